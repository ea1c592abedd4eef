/* Register tiles of the matrix product: sums[m][n] += x[m] . w[n], `mr` by `nr` of them over `k` elements.
 *
 * Included once for each kind of operands, with
 *   FORM(name)  name of a function for these operands
 *   TILE_X      type of x's elements         TILE_W      type of w's elements
 *   TILE_DOT    defined: one instruction multiplies a chunk of both (AVX512_BF16); else
 *   TILE_LOAD_X, TILE_LOAD_W   chunk loads, with compatible order of elements
 *
 * With `ahead` a tile also asks for the weights of the tile of outputs that comes next: the rows are too short for the
 * hardware to see the stream.
 *
 * Both operands run along k, so plain row-major weights need no packing. Every sum has one accumulator and adds
 * its products in the same order whatever mr and nr are: a row's result does not depend on the batch.
 */
INLINE void FORM(tile)(const int ahead, const int mr, const int nr, const TILE_X *x, long x_stride, const TILE_W *w, long w_stride,
                       long k, ACC *sums, long sums_stride) {
    VACC acc[8][TILE_ROWS];
#pragma GCC unroll 8
    for (int n = 0; n < nr; n++)
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++) acc[n][m] = (VACC){0};
    for (long i = 0; i < k; i += CHUNK) {
#ifdef TILE_DOT
        __m512bh xs[TILE_ROWS];
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++) xs[m] = (__m512bh)_mm512_loadu_si512(x + m * x_stride + i);
#pragma GCC unroll 8
        for (int n = 0; n < nr; n++) {
            if (ahead) __builtin_prefetch(w + (n + nr) * w_stride + i, 0, AHEAD_HINT);
            __m512bh ws = (__m512bh)_mm512_loadu_si512(w + n * w_stride + i);
#pragma GCC unroll 8
            for (int m = 0; m < mr; m++) acc[n][m] = (VACC)_mm512_dpbf16_ps((__m512)acc[n][m], xs[m], ws);
        }
#else
        VACC xs[TILE_ROWS], wide, unused;
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++) TILE_LOAD_X(x + m * x_stride + i, &xs[m], &unused);
#pragma GCC unroll 8
        for (int n = 0; n < nr; n++) {
            if (ahead) __builtin_prefetch(w + (n + nr) * w_stride + i, 0, AHEAD_HINT);
            TILE_LOAD_W(w + n * w_stride + i, &wide, &unused);
#pragma GCC unroll 8
            for (int m = 0; m < mr; m++) acc[n][m] += xs[m] * wide;
        }
        /* Load again rather than keep: accumulators need the registers. */
        __asm__ volatile("" ::: "memory");
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++) TILE_LOAD_X(x + m * x_stride + i, &unused, &xs[m]);
#pragma GCC unroll 8
        for (int n = 0; n < nr; n++) {
            TILE_LOAD_W(w + n * w_stride + i, &unused, &wide);
#pragma GCC unroll 8
            for (int m = 0; m < mr; m++) acc[n][m] += xs[m] * wide;
        }
#endif
    }
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
        ACC four[4];
        if (nr == 1) {
            SUM4(acc[0][m], (VACC){0}, (VACC){0}, (VACC){0}, four);
            sums[m * sums_stride] += four[0];
        } else {
#pragma GCC unroll 2
            for (int n = 0; n < nr; n += 4) {
                SUM4(acc[n][m], acc[n + 1][m], acc[n + 2][m], acc[n + 3][m], four);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sums[m * sums_stride + n + j] += four[j];
            }
        }
    }
}

/* One tile of constant size at row m, the first one of a tile of outputs looking ahead. */
#define TILE_AT(mr, nr)                                                                                              \
    if (TILE_AHEAD && m == 0)                                                                                        \
        FORM(tile)(1, mr, nr, x, x_stride, w, w_stride, k, sums, sums_stride);                                       \
    else                                                                                                             \
        FORM(tile)(0, mr, nr, x + m * x_stride, x_stride, w, w_stride, k, sums + m * sums_stride, sums_stride);      \
    m += mr

/* Any number of rows against four weight rows; a single row is left over only where there is but one. */
static void FORM(tile_rows)(long rows, const TILE_X *x, long x_stride, const TILE_W *w, long w_stride, long k,
                            ACC *sums, long sums_stride) {
    long m = 0, full = rows / TILE_ROWS, rest = rows % TILE_ROWS;
    if (rest == 1 && full > 0) {
        full--;
        rest += TILE_ROWS;
    }
    for (; full > 0; full--) {
        TILE_AT(TILE_ROWS, 4);
    }
    switch (rest) {
    case 1: TILE_AT(1, 4); break;
    case 2: TILE_AT(2, 4); break;
#if TILE_ROWS > 3
    case 3: TILE_AT(3, 4); break;
    case 5: TILE_AT(5, 4); break;
    case 7: TILE_AT(3, 4); /* fall through */
    case 4: TILE_AT(4, 4); break;
#else
    case 4: TILE_AT(2, 4); TILE_AT(2, 4); break;
#endif
    default: break;
    }
}

/* Any number of rows against one weight row: what is left of the outputs, and ends of rows. */
static void FORM(tile_column)(long rows, const TILE_X *x, long x_stride, const TILE_W *w, long k, ACC *sums,
                              long sums_stride) {
    for (long m = 0; m < rows; m++)
        FORM(tile)(0, 1, 1, x + m * x_stride, x_stride, w, 0, k, sums + m * sums_stride, sums_stride);
}
#undef TILE_AT

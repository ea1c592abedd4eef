/* Register tiles of the matrix product: sums[m][n] += x[m] . w[n], `mr` by `nr` of them over `k` elements.
 *
 * Included once for each kind of operands, with
 *   FORM(name)  name of a function for these operands
 *   TILE_X      type of x's elements         TILE_W      type of w's elements
 *   TILE_DOT    defined: one instruction multiplies a chunk of both (AVX512_BF16); else
 *   TILE_LOAD_X, TILE_LOAD_W   chunk loads, with compatible order of elements
 *
 * Both operands run along k, so plain row-major weights need no packing. Every sum has one accumulator and adds
 * its products in the same order whatever mr and nr are: a row's result does not depend on the batch.
 */
INLINE void FORM(tile)(const int mr, const int nr, const TILE_X *x, long x_stride, const TILE_W *w, long w_stride,
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

/* The same for any number of rows: full tiles, then the rest. nr is 1 or 4. */
static void FORM(tile_rows)(long rows, const int nr, const TILE_X *x, long x_stride, const TILE_W *w,
                            long w_stride, long k, ACC *sums, long sums_stride) {
    long m = 0;
#define ROWS(mr)                                                                                                     \
    if (nr == 4)                                                                                                     \
        FORM(tile)(mr, 4, x + m * x_stride, x_stride, w, w_stride, k, sums + m * sums_stride, sums_stride);                \
    else                                                                                                             \
        FORM(tile)(mr, 1, x + m * x_stride, x_stride, w, w_stride, k, sums + m * sums_stride, sums_stride)
    for (; m + TILE_ROWS <= rows; m += TILE_ROWS) ROWS(TILE_ROWS);
    switch (rows - m) {
    case 1: ROWS(1); break;
    case 2: ROWS(2); break;
#if TILE_ROWS > 3
    case 3: ROWS(3); break;
    case 4: ROWS(4); break;
    case 5: ROWS(5); break;
#endif
    default: break;
    }
#undef ROWS
}

/* out = x @ w^T + bias for one dtype. See kernels.c for the macros that stand for the dtype, and for Out.
 *
 * Blocking: BLOCK_M rows of x (widened once into scratch where their stored form cannot be used as it is), BLOCK_N
 * outputs, BLOCK_K elements of the inner dimension. The split of k is fixed, so that results do not depend on how
 * many rows there are. Strides of scratch are no multiple of a page: rows at equal page offsets would fight for the
 * same cache lines. Where a weight row serves many rows of x, it is widened once for all of them.
 */
#define FORM(name) NAME(name)
#define TILE_W T
#define TILE_AHEAD 1
#ifdef BF16_DOT
#define TILE_X T
#define TILE_DOT
#define X_AS_STORED 1
#else
#define TILE_X ACC
#define TILE_LOAD_X LOAD_A
#define TILE_LOAD_W LOAD_T
#define X_AS_STORED (!STORAGE_IS_NARROW)
#endif
#include "gemm_tile.h"
typedef TILE_X NAME(Staged); /* x as the tiles read it */
#undef FORM
#undef TILE_W

#if STORAGE_IS_NARROW && !defined(BF16_DOT)
#define WIDE_WEIGHTS 1
#define FORM(name) NAME(GLUE(name, _wide))
#define TILE_W ACC
#undef TILE_AHEAD
#define TILE_AHEAD 0
#undef TILE_LOAD_W
#define TILE_LOAD_W LOAD_A
#include "gemm_tile.h"
#undef FORM
#undef TILE_W
#else
#define WIDE_WEIGHTS 0
#endif
#undef TILE_X
#undef TILE_LOAD_X
#undef TILE_LOAD_W
#undef TILE_DOT
#undef TILE_AHEAD

#define WIDE_STRIDE (BLOCK_K + CHUNK)

/* Copy n elements into scratch form, padded with zeros to whole chunks. */
INLINE void NAME(stage_x)(const T *x, long n, NAME(Staged) *out) {
    long whole = n / CHUNK * CHUNK;
#if defined(BF16_DOT)
    memcpy(out, x, (size_t)n * sizeof(T));
    if (whole < n) memset(out + n, 0, (size_t)(whole + CHUNK - n) * sizeof(T));
#else
    NAME(widen)(x, n, out);
#endif
    (void)whole;
}

#if WIDE_WEIGHTS
/* Part of a weight row, widened; asks for the same part of the row `ahead` elements further on. */
INLINE void NAME(widen_weights)(const T *w, long ahead, long n, ACC *out) {
    for (long i = 0; i < n; i += CHUNK) {
        VACC lo, hi;
        __builtin_prefetch(w + ahead + i, 0, AHEAD_HINT);
        LOAD_T(w + i, &lo, &hi);
        STORE_A(out + i, lo, hi);
    }
}
#endif

/* Outputs from this one on. */
INLINE Out NAME(out_at)(Out out, long row, long column) {
    const size_t size = out.is_wide ? sizeof(ACC) : sizeof(T);
    out.data = (char *)out.data + (size_t)(row * out.stride + column) * size;
    return out;
}

/* Sums [rows, n], with their bias, become outputs. */
INLINE void NAME(put_sums)(const ACC *sums, long sums_stride, const T *bias, Out out, long rows, long n) {
    for (long row = 0; row < rows; row++, sums += sums_stride)
        if (STORAGE_IS_NARROW && !out.is_wide) {
            T *restrict to = (T *)out.data + row * out.stride;
            for (long i = 0; i < n; i++) to[i] = FROM_ACC(sums[i] + (bias ? TO_ACC(bias[i]) : 0));
        } else {
            ACC *restrict to = (ACC *)out.data + row * out.stride;
            for (long i = 0; i < n; i++) to[i] = sums[i] + (bias ? TO_ACC(bias[i]) : 0);
        }
}

/* Outputs [n_begin, n_end) for all rows. */
static int NAME(linear_part)(const T *x, long x_stride, const T *w, long w_stride, const T *bias, Out out,
                             long num_rows, long n_begin, long n_end, long k) {
    const long k_whole = k / CHUNK * CHUNK, k_padded = ROUND_UP(k, CHUNK) + CHUNK;
    const int stage = !X_AS_STORED || k_whole != k;
    const long block_m = num_rows < BLOCK_M ? num_rows : BLOCK_M;
    const size_t staged_bytes = stage ? ROUND_UP((size_t)(block_m * k_padded) * sizeof(NAME(Staged)), 64) : 0;
    const size_t sums_bytes = ROUND_UP((size_t)(block_m * BLOCK_N) * sizeof(ACC), 64);
    char *space = scratch(staged_bytes + sums_bytes + (WIDE_WEIGHTS ? 4 * WIDE_STRIDE * sizeof(ACC) : 0));
    if (!space) return ERROR_MEMORY;
    NAME(Staged) *staged = (NAME(Staged) *)space;
    ACC *sums = (ACC *)(space + staged_bytes);
#if WIDE_WEIGHTS
    ACC *wide = (ACC *)(space + staged_bytes + sums_bytes);
#endif
    for (long m0 = 0; m0 < num_rows; m0 += block_m) {
        const long rows = num_rows - m0 < block_m ? num_rows - m0 : block_m;
        const NAME(Staged) *xb = (const NAME(Staged) *)(x + m0 * x_stride);
        long xb_stride = x_stride;
        if (stage) {
            for (long m = 0; m < rows; m++) NAME(stage_x)(x + (m0 + m) * x_stride, k, staged + m * k_padded);
            xb = staged;
            xb_stride = k_padded;
        }
        for (long n0 = n_begin; n0 < n_end; n0 += BLOCK_N) {
            const long cols = n_end - n0 < BLOCK_N ? n_end - n0 : BLOCK_N;
            memset(sums, 0, (size_t)(rows * BLOCK_N) * sizeof(ACC));
            for (long k0 = 0; k0 < k_whole; k0 += BLOCK_K) {
                const long depth = k_whole - k0 < BLOCK_K ? k_whole - k0 : BLOCK_K;
                long n = 0;
                for (; n + 4 <= cols; n += 4) {
                    const T *wn = w + (n0 + n) * w_stride + k0;
#if WIDE_WEIGHTS
                    if (rows >= WIDEN_FROM) {
                        for (int j = 0; j < 4; j++) NAME(widen_weights)(wn + j * w_stride, 4 * w_stride, depth, wide + j * WIDE_STRIDE);
                        NAME(tile_rows_wide)(rows, xb + k0, xb_stride, wide, WIDE_STRIDE, depth, sums + n, BLOCK_N);
                        continue;
                    }
#endif
                    NAME(tile_rows)(rows, xb + k0, xb_stride, wn, w_stride, depth, sums + n, BLOCK_N);
                }
                for (; n < cols; n++)
                    NAME(tile_column)(rows, xb + k0, xb_stride, w + (n0 + n) * w_stride + k0, depth, sums + n,
                                      BLOCK_N);
            }
            if (k_whole != k) {
                for (long n = 0; n < cols; n++) {
                    T rest[CHUNK] = {0};
                    memcpy(rest, w + (n0 + n) * w_stride + k_whole, (size_t)(k - k_whole) * sizeof(T));
                    NAME(tile_column)(rows, xb + k_whole, xb_stride, rest, CHUNK, sums + n, BLOCK_N);
                }
            }
            NAME(put_sums)(sums, BLOCK_N, bias ? bias + n0 : NULL, NAME(out_at)(out, m0, n0), rows, cols);
        }
    }
    return 0;
}

typedef struct {
    const T *x, *w, *bias;
    Out out;
    long x_stride, w_stride, num_rows, n, k, num_parts;
    int error;
} NAME(Product);

static void NAME(linear_body)(void *arguments, Draw *draw) {
    NAME(Product) *const p = arguments;
    for (long part; (part = jettison_pool_next(draw)) >= 0;) {
        const long begin = part * p->n / p->num_parts / 4 * 4;
        const long end = part + 1 == p->num_parts ? p->n : (part + 1) * p->n / p->num_parts / 4 * 4;
        const int error = NAME(linear_part)(p->x, p->x_stride, p->w, p->w_stride, p->bias, p->out, p->num_rows, begin,
                                            end, p->k);
        if (error) __atomic_fetch_or(&p->error, error, __ATOMIC_RELAXED);
    }
}

static int NAME(linear)(const T *x, long x_stride, const T *w, long w_stride, const T *bias, Out out, long num_rows,
                        long n, long k, int num_threads) {
    const long most = (n + BLOCK_N - 1) / BLOCK_N, num_parts = most < 2 * num_threads ? most : 2 * num_threads;
    NAME(Product) product = {x, w, bias, out, x_stride, w_stride, num_rows, n, k, num_parts, 0};
    jettison_pool_run(num_threads, num_parts, NAME(linear_body), &product);
    return product.error;
}
#undef X_AS_STORED
#undef WIDE_WEIGHTS
#undef WIDE_STRIDE

/* The C ABI of the kernels, compiled once for each instruction set (VARIANT) into one library.
 *
 * Here: the table of dtypes, argument checks that need to walk the block tables, and the exported functions
 * jettison_<variant>_<operation>. The algorithms are in gemm.h, packed.h, integer_product.h, experts.h, attention.h, elementwise.h and layer.h, each included
 * once a dtype. No allocation but per-thread scratch, no global state but the pool of threads, no dependence on Python or torch.
 *
 * dtype codes: 0 float64, 1 float32, 2 bfloat16. Strides are in elements, of whole tokens (rows). Functions return
 * 0 or one of the ERROR codes, and have then written nothing (ERROR_MEMORY apart).
 */
#include <limits.h>
#include <math.h>

#include "simd.h"
#include "integers.h"
#include "scratch.h"
#include "pool.h"
#if defined(USE_TILES) || defined(EMULATE_TILES)
#include "tiles.h"
#define TILES
#endif

#define ERROR_BLOCK_ID 1 /* a block id outside the arena */
#define ERROR_TABLE 2    /* a row needs more blocks than its table has */
#define ERROR_LENGTHS 4  /* negative lengths, or they do not add up to the number of tokens */
#define ERROR_POSITION 8 /* a position outside the rotary tables */
#define ERROR_MEMORY 16
#define ERROR_DTYPE 32
#define ERROR_ROW 64 /* a row outside the matrix */
#define ERROR_EXPERT 128

/* Kinds of RMS norms: rounded before the gain; once, behind it; and with a gain of 1 + weight. */
#define NORM_ROUNDED_FIRST 0
#define NORM_ROUNDED_ONCE 1
#define NORM_PLUS_ONE 2

#define GLUE_(a, b) a##b
#define GLUE(a, b) GLUE_(a, b)

/* What a layer's halves take; native.py makes them. All of 64 bits, pointers too. */
typedef struct {
    const void *data, *bias; /* bias: NULL for none */
    long is_packed;
    Form form; /* of integers; else zeros */
} Matrix;

typedef struct {
    Matrix qkv, o, gate_up, down;
    const void *q_norm, *k_norm, *post_norm; /* norms of heads: NULL for none */
    void *arena;
    long num_blocks;
} LayerWeights;

typedef struct { /* activations are contiguous, [tokens, ...] */
    void *residual, *x, *qkv, *attention, *gate_up, *activated;
    long hidden, num_heads, num_kv_heads, head_dim, inner, block_size;
} LayerShape;

typedef struct {
    const void *cos, *sin;
    long rotary_dim, max_positions, window, norm; /* window: 0 for none; norm: of heads */
    double eps, scale, softcap;
} LayerConstants;

typedef struct {
    const int32_t *tables;
    long table_stride, max_blocks;
    const int32_t *query_lens, *context_lens;
    long num_rows;
    const int32_t *positions;
    long num_tokens;
} BatchRows;

typedef struct { /* contiguous, too */
    const void *x;
    void *out, *gate_up, *activated, *each;
    const void *gate_up_weight, *gate_up_bias, *down_weight, *down_bias;
    const int64_t *chosen;
    const void *shares;
    int32_t *space; /* num_experts + 1, and for each pair of a token and an expert five */
    long num_tokens, num_chosen, num_experts, hidden, inner, is_clamped;
    Form gate_up_form, down_form; /* zeros: packed */
} ExpertShape;

typedef struct { /* where a product goes */
    void *data;
    long stride;
    int is_wide; /* its elements are sums, as they are, not rounded to the operands' type */
} Out;

/* Sizes of blocks; measured with benchmarks/kernels.py. */
#define BLOCK_M 64
#define BLOCK_N 64
#define BLOCK_K 1024
#define WIDEN_FROM 12 /* rows from which bfloat16 weights are widened once for all of them */
#define PACK_FROM 12  /* the same for keys and values */
#define AHEAD_HINT 3  /* how near weights are asked for: 3 = first-level cache */
#if VEC_BYTES == 64 || defined(__aarch64__)
#define TILE_ROWS 6 /* 32 vector registers */
#else
#define TILE_ROWS 3 /* 16 */
#endif

/* ---- float64 ---- */
#define NAME(x) GLUE(x, _f64)
#define T double
#define ACC double
#define VACC vf64
#define CHUNK (2 * LANES_F64)
#define STORAGE_IS_NARROW 0
#define IS_PACKED 0
#define LOAD_T load_f64
#define LOAD_A load_f64
#define STORE_T store_f64
#define STORE_A store_f64
#define SUM4 sum4_f64
#define TO_ACC(x) (x)
#define FROM_ACC(x) (x)
#define SQRT sqrt
#define EXP exp_f64
#define TANH tanh_f64
#define LOG log
#include "all.h"

/* ---- float32 ---- */
#define NAME(x) GLUE(x, _f32)
#define T float
#define ACC float
#define VACC vf32
#define CHUNK (2 * LANES_F32)
#define STORAGE_IS_NARROW 0
#define IS_PACKED 1
#define LOAD_T load_f32
#define LOAD_A load_f32
#define STORE_T store_f32
#define STORE_A store_f32
#define SUM4 sum4_f32
#define TO_ACC(x) (x)
#define FROM_ACC(x) (x)
#define SQRT sqrtf
#define EXP exp_f32
#define TANH tanh_f32
#define LOG logf
#include "all.h"

/* ---- bfloat16, summed in float32 ---- */
#define NAME(x) GLUE(x, _bf16)
#define T bf16
#define ACC float
#define VACC vf32
#define CHUNK (2 * LANES_F32)
#define STORAGE_IS_NARROW 1
#define IS_PACKED 1
#define LOAD_T load_bf16
#define LOAD_A load_f32
#define STORE_T store_bf16
#define STORE_A store_f32
#define SUM4 sum4_f32
#define TO_ACC(x) bf16_to_f32(x)
#define FROM_ACC(x) f32_to_bf16(x)
#define SQRT sqrtf
#define EXP exp_f32
#define TANH tanh_f32
#define LOG logf
#if defined(__AVX512BF16__)
#define BF16_DOT
#endif
#include "all.h"

/* ---- exported ---- */
#define API(name) __attribute__((visibility("default"))) int GLUE(GLUE(GLUE(jettison_, VARIANT), _), name)
#define BY_DTYPE(dtype, f64, f32, bf)                                                                                \
    switch (dtype) {                                                                                                 \
    case 0: f64; break;                                                                                              \
    case 1: f32; break;                                                                                              \
    case 2: bf; break;                                                                                               \
    default: return ERROR_DTYPE;                                                                                     \
    }

/* Rows that read (and perhaps write) positions up to their last query, or, where `only_context`, of their context. */
static int check_rows(long num_blocks, long block_size, const int32_t *tables, long table_stride, long max_blocks,
                      const int32_t *query_lens, const int32_t *context_lens, long num_rows, long num_tokens,
                      int only_context) {
    int error = 0;
    long tokens = 0;
    for (long r = 0; r < num_rows; r++) {
        if (query_lens[r] < 0 || context_lens[r] < 0) return ERROR_LENGTHS;
        tokens += query_lens[r];
        if (only_context && query_lens[r] > 0 && context_lens[r] == 0) return ERROR_LENGTHS;
        const long end = (long)context_lens[r] + (only_context ? 0 : query_lens[r]);
        const long used = (end + block_size - 1) / block_size;
        if (used > max_blocks) return ERROR_TABLE;
        for (long b = 0; b < used; b++) {
            const long id = tables[r * table_stride + b];
            error |= id < 0 || id >= num_blocks ? ERROR_BLOCK_ID : 0;
        }
    }
    return tokens != num_tokens ? ERROR_LENGTHS : error;
}

API(write_kv)(int dtype, const void *k, long k_stride, const void *v, long v_stride, void *arena, long num_blocks,
              long num_kv_heads, long block_size, long head_dim, const int32_t *tables, long table_stride,
              long max_blocks, const int32_t *query_lens, const int32_t *context_lens, long num_rows, long num_tokens) {
    const int error = check_rows(num_blocks, block_size, tables, table_stride, max_blocks, query_lens, context_lens,
                                 num_rows, num_tokens, 0);
    if (error) return error;
#define CALL(S, T)                                                                                                   \
    write_kv_##S((const T *)k, k_stride, (const T *)v, v_stride, (T *)arena, num_kv_heads, block_size, head_dim,     \
                 tables, table_stride, query_lens, context_lens, num_rows)
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(attention)(int dtype, const void *q, long q_stride, long num_heads, const void *arena, long num_blocks,
               long num_kv_heads, long block_size, long head_dim, const int32_t *tables, long table_stride,
               long max_blocks, const int32_t *query_lens, const int32_t *context_lens, long num_rows, long num_tokens,
               void *out, long out_stride, void *lse, int only_context, const int32_t *first_positions, long window,
               double softcap, double scale, int num_threads) {
    const int error = check_rows(num_blocks, block_size, tables, table_stride, max_blocks, query_lens, context_lens,
                                 num_rows, num_tokens, only_context);
    if (error) return error;
#define CALL(S, T, A)                                                                                                \
    return attention_##S((const T *)q, q_stride, (const T *)arena, num_kv_heads, block_size, head_dim, num_heads,    \
                         tables, table_stride, query_lens, context_lens, num_rows, (T *)out, out_stride, (A *)lse,   \
                         only_context, first_positions, window, softcap, scale, num_threads)
    BY_DTYPE(dtype, CALL(f64, double, double), CALL(f32, float, float), CALL(bf16, bf16, float))
#undef CALL
    return 0;
}

API(linear)(int dtype, const void *x, long x_stride, const void *w, long w_stride, const void *bias, void *out,
            long out_stride, int is_wide, long num_rows, long n, long k, int num_threads) {
    const Out to = {out, out_stride, is_wide};
#define CALL(S, T)                                                                                                   \
    return linear_##S((const T *)x, x_stride, (const T *)w, w_stride, (const T *)bias, to, num_rows, n, k, num_threads)
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

/* By a packed matrix, or (with a form) by integers. */
API(linear_slab)(int dtype, const Form *form, const void *x, long x_stride, const void *w, const void *bias,
                 void *out, long out_stride, int is_wide, long num_rows, long n, long k, int num_threads) {
    const Out to = {out, out_stride, is_wide};
#define CALL(S, T)                                                                                                   \
    return linear_slab_##S(form, (const T *)x, x_stride, w, (const T *)bias, to, num_rows, n, k, num_threads)
    BY_DTYPE(dtype, return ERROR_DTYPE, CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(pack_integers)(const Form *form, const int8_t *rows, const uint16_t *scales, long scales_stride,
                   const uint16_t *offsets, long offsets_stride, long first, long count, long k, void *packed) {
    pack_integers(form, rows, scales, scales_stride, offsets, offsets_stride, first, count, k, packed);
    return 0;
}

API(gather_integers)(int dtype, const Form *form, const void *packed, long n, long k, const int64_t *ids, long count,
                     void *out, long stride) {
    for (long i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return ERROR_ROW;
#define CALL(S, T) gather_integers_##S(form, packed, k, ids, count, (T *)out, stride)
    BY_DTYPE(dtype, return ERROR_DTYPE, CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(pack_rows)(int dtype, const void *rows, long stride, long first, long count, long n, long k, void *packed) {
#define CALL(S, T) pack_rows_##S((const T *)rows, stride, first, count, n, k, (T *)packed)
    BY_DTYPE(dtype, return ERROR_DTYPE, CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(gather_rows)(int dtype, const void *packed, long n, long k, const int64_t *ids, long count, void *out,
                 long stride) {
    for (long i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return ERROR_ROW;
#define CALL(S, T) gather_rows_##S((const T *)packed, n, k, ids, count, (T *)out, stride)
    BY_DTYPE(dtype, return ERROR_DTYPE, CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(rms_norm)(int dtype, const void *x, long x_stride, const void *weight, double eps, void *out, long out_stride,
              long num_rows, long n, long kind) {
#define CALL(S, T)                                                                                                   \
    rms_norm_##S((const T *)x, x_stride, (const T *)weight, eps, (T *)out, out_stride, num_rows, n, kind)
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(add_rms_norm)(int dtype, const void *x, long x_stride, void *residual, long residual_stride, const void *weight,
                  double eps, void *out, long out_stride, long num_rows, long n, int num_threads) {
#define CALL(S, T)                                                                                                   \
    add_norm_rows_##S((const T *)x, x_stride, (T *)residual, residual_stride, (const T *)weight, eps, (T *)out,      \
                      out_stride, num_rows, n, num_threads)
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(head_rms_norm)(int dtype, void *x, long x_stride, const void *weight, double eps, long num_rows, long heads,
                   long n, long kind) {
#define CALL(S, T) head_rms_norm_##S((T *)x, x_stride, (const T *)weight, eps, num_rows, heads, n, kind)
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(rotary)(int dtype, void *q, long q_stride, long q_heads, void *k, long k_stride, long k_heads, const void *cos,
            const void *sin, const void *positions, int wide_positions, long num_rows, long head_dim, long rotary_dim,
            long max_positions) {
    for (long r = 0; r < num_rows; r++) {
        const int64_t p = wide_positions ? ((const int64_t *)positions)[r] : ((const int32_t *)positions)[r];
        if (p < 0 || p >= max_positions) return ERROR_POSITION;
    }
#define CALL(S, T, A)                                                                                                \
    rotary_##S((T *)q, q_stride, q_heads, (T *)k, k_stride, k_heads, (const A *)cos, (const A *)sin, positions,      \
               wide_positions, num_rows, head_dim, rotary_dim)
    BY_DTYPE(dtype, CALL(f64, double, double), CALL(f32, float, float), CALL(bf16, bf16, float))
#undef CALL
    return 0;
}

API(silu_mul)(int dtype, const void *gate_up, long in_stride, void *out, long out_stride, long num_rows, long n) {
#define CALL(S, T) silu_mul_##S((const T *)gate_up, in_stride, (T *)out, out_stride, num_rows, n)
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

API(attend_layer)(int dtype, const LayerShape *shape, const LayerWeights *weights, const LayerConstants *constants,
                  const BatchRows *batch, int num_threads) {
    for (long i = 0; i < batch->num_tokens; i++)
        if (batch->positions[i] < 0 || batch->positions[i] >= constants->max_positions) return ERROR_POSITION;
    const int error = check_rows(weights->num_blocks, shape->block_size, batch->tables, batch->table_stride,
                                 batch->max_blocks, batch->query_lens, batch->context_lens, batch->num_rows,
                                 batch->num_tokens, 0);
    if (error) return error;
#define CALL(S) return attend_layer_##S(shape, weights, constants, batch, num_threads)
    BY_DTYPE(dtype, CALL(f64), CALL(f32), CALL(bf16))
#undef CALL
    return 0;
}

API(feed_forward)(int dtype, const LayerShape *shape, const LayerWeights *weights, double eps, long num_rows,
                  int num_threads) {
#define CALL(S) return feed_forward_##S(shape, weights, eps, num_rows, num_threads)
    BY_DTYPE(dtype, CALL(f64), CALL(f32), CALL(bf16))
#undef CALL
    return 0;
}

API(experts)(int dtype, const ExpertShape *shape, int num_threads) {
#define CALL(S) return experts_##S(shape, num_threads)
    BY_DTYPE(dtype, return ERROR_DTYPE, CALL(f32), CALL(bf16))
#undef CALL
    return 0;
}

API(argmax)(int dtype, const void *logits, long stride, long num_rows, long n, int64_t *tokens, int num_threads) {
    num_threads = num_rows * n < 65536 ? 1 : num_threads;
#define CALL(S, T)                                                                                                   \
    {                                                                                                                \
        GLUE(ArgmaxWork_, S) work = {(const T *)logits, tokens, stride, n};                                          \
        jettison_pool_run(num_threads, num_rows, argmax_body_##S, &work);                                            \
    }
    BY_DTYPE(dtype, CALL(f64, double), CALL(f32, float), CALL(bf16, bf16))
#undef CALL
    return 0;
}

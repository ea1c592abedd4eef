/* Products with packed weights, for bfloat16 and float32: out = x @ w^T + bias.
 *
 * A packed matrix [n, k] (k a multiple of 32) is n / 32 groups of 32 outputs, one after the other, and after them the
 * last n % 32 rows as they were. What a thread reads for a group is one contiguous stream, and no sum crosses lanes:
 *   float32   k rows of 32 numbers: element (i, j) of a group at j * 32 + i
 *   bfloat16  k / 32 steps of two tiles of 1 KiB; a tile is 16 pairs of k by 16 outputs by 2. A row of a tile is one
 *             operand of VDPBF16PS, a tile one of TDPBF16PS (the B operand)
 * The same number of bytes as the plain matrix.
 *
 * Every output is one chain of sums over ascending k, whatever the number of rows: accumulators that have to leave
 * their registers between two blocks of k are stored in full. So a row's result has the same bits in every batch.
 */
#define GROUP 32
#define PACKED_BLOCK_K 256 /* elements of k: 16 or 32 KiB of a group stay in the first-level cache for all rows */
#define PACKED_CHUNKS 8    /* pieces of work a thread */
/* How far on weights are asked for that serve one tile's rows alone. With few rows the processor's own prefetchers keep
 * up, and asking far ahead takes their place; asking is for little where weights are read in the order in which they lie. */
#define FEW_ROWS 4
#define AHEAD_IN_ORDER_BYTES 512
#ifdef BF16_DOT
#define AHEAD_OF_FEW_BYTES AHEAD_IN_ORDER_BYTES
#else
#define AHEAD_OF_FEW_BYTES 2048
#endif
#define AHEAD_BYTES 8192

#if STORAGE_IS_NARROW && defined(TILES)
#define PACKED_ROWS TILE_ROWS_OF_X
#define PACKED_VECTORS 2
typedef T NAME(PackedX);
#elif defined(BF16_DOT)
#define PACKED_ROWS 12
#define PACKED_VECTORS 2
typedef T NAME(PackedX);
#elif STORAGE_IS_NARROW
#define PACKED_ROWS (VEC_BYTES == 64 ? 10 : 4)
#define PACKED_VECTORS 2
typedef ACC NAME(PackedX);
#else
#define PACKED_ROWS (VEC_BYTES == 64 ? 12 : VEC_BYTES == 32 ? 6 : 4)
#define PACKED_VECTORS 2
typedef ACC NAME(PackedX);
#endif
#if STORAGE_IS_NARROW && defined(TILES)
#define PACKED_BEGIN tiles_begin
#define PACKED_END tiles_end
#else
#define PACKED_BEGIN()
#define PACKED_END()
#endif
#define PACKED_WIDTH (PACKED_VECTORS * LANES_F32) /* outputs of a register tile */

/* Element (row, column) of a packed matrix with k columns, in elements from its beginning. */
INLINE long NAME(packed_at)(long row, long column, long k) {
    const long group = row / GROUP * GROUP * k;
#if STORAGE_IS_NARROW
    return group + column / 32 * 1024 + row % GROUP / 16 * 512 + column % 32 / 2 * 32 + row % 16 * 2 + column % 2;
#else
    return group + column * GROUP + row % GROUP;
#endif
}

/* Plain rows [first, first + count) of a matrix [n, k], from `rows` into their places. */
static void NAME(pack_rows)(const T *rows, long stride, long first, long count, long n, long k, T *packed) {
    for (long i = 0; i < count; i++) {
        const T *from = rows + i * stride;
        const long row = first + i;
        if (row >= n / GROUP * GROUP) {
            memcpy(packed + row * k, from, (size_t)k * sizeof(T));
            continue;
        }
#if STORAGE_IS_NARROW
        T *to = packed + NAME(packed_at)(row, 0, k);
        for (long step = 0; step < k; step += 32, to += 1024)
            for (long pair = 0; pair < 16; pair++) memcpy(to + pair * 32, from + step + 2 * pair, 2 * sizeof(T));
#else
        for (long column = 0; column < k; column++) packed[NAME(packed_at)(row, column, k)] = from[column];
#endif
    }
}

/* Rows of a packed matrix [n, k], plain: out[i] = row ids[i], which the caller has checked. */
static void NAME(gather_rows)(const T *packed, long n, long k, const int64_t *ids, long count, T *out, long stride) {
    for (long i = 0; i < count; i++) {
        const long row = ids[i];
        T *to = out + i * stride;
        if (row >= n / GROUP * GROUP) {
            memcpy(to, packed + row * k, (size_t)k * sizeof(T));
            continue;
        }
        const T *from = packed + NAME(packed_at)(row, 0, k);
#if STORAGE_IS_NARROW
        for (long step = 0; step < k; step += 32, from += 1024)
            for (long pair = 0; pair < 16; pair++) memcpy(to + step + 2 * pair, from + pair * 32, 2 * sizeof(T));
#else
        for (long column = 0; column < k; column++) to[column] = from[column * GROUP];
#endif
    }
}

/* Up to two cache lines of weights that are needed soon, into the second-level cache. */
INLINE void NAME(ask_for)(const T **ahead, long bytes) {
    if (!*ahead) return;
    __builtin_prefetch(*ahead, 0, 2);
    if (bytes > 64) __builtin_prefetch((const char *)*ahead + 64, 0, 2);
    *ahead = (const T *)((const char *)*ahead + bytes);
}

#if STORAGE_IS_NARROW && defined(TILES)
/* One group's outputs for `rows` rows, of which x has a multiple of TILE_ROWS_OF_X (as many as are missing are zeros), in
 * tiles of 16 or 32 rows by 32 outputs. `sums`: as many rows as x. */
static void NAME(packed_group)(const T *x, long x_stride, const T *w, const T *bias, Out out, long rows, long k,
                               ACC *sums) {
    const long x_bytes = x_stride * (long)sizeof(T), padded = ROUND_UP(rows, TILE_ROWS_OF_X);
    const long block = padded <= 2 * TILE_ROWS_OF_X ? k : PACKED_BLOCK_K;
    for (long begin = 0; begin < k; begin += block) {
        const long end = k - begin < block ? k : begin + block;
        for (long row = 0; row < padded; row += 2 * TILE_ROWS_OF_X) {
            const T *upper = x + row * x_stride, *lower = upper + TILE_ROWS_OF_X * x_stride;
            ACC *const to = sums + row * GROUP, *const below = to + TILE_ROWS_OF_X * GROUP;
            const int is_pair = padded - row > TILE_ROWS_OF_X;
            if (begin == 0) {
                TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
            } else {
                TILE_LOAD(0, to, GROUP * 4);
                TILE_LOAD(1, to + 16, GROUP * 4);
                if (is_pair) {
                    TILE_LOAD(2, below, GROUP * 4);
                    TILE_LOAD(3, below + 16, GROUP * 4);
                }
            }
            for (long i = begin; i < end; i += 32) {
                TILE_LOAD(6, w + i * GROUP, 64);
                TILE_LOAD(7, w + i * GROUP + 512, 64);
                TILE_LOAD(4, upper + i, x_bytes);
                TILE_MULTIPLY(0, 4, 6);
                TILE_MULTIPLY(1, 4, 7);
                if (is_pair) {
                    TILE_LOAD(5, lower + i, x_bytes);
                    TILE_MULTIPLY(2, 5, 6);
                    TILE_MULTIPLY(3, 5, 7);
                }
            }
            TILE_STORE(0, to, GROUP * 4);
            TILE_STORE(1, to + 16, GROUP * 4);
            if (is_pair) {
                TILE_STORE(2, below, GROUP * 4);
                TILE_STORE(3, below + 16, GROUP * 4);
            }
        }
    }
    NAME(put_sums)(sums, GROUP, bias, out, rows, GROUP);
}
#else
/* `rows` rows of x by PACKED_WIDTH outputs of a group, over `k` elements: adds to `sums` (from zero, where `begins`).
 * `w` points at the first output's first element, `x` at the first row's. Weights at `ahead` are asked for meanwhile, as
 * many as are used here, or half of them, or none: a group is used by all rows while the next comes from memory. */
INLINE void NAME(packed_tile)(const int rows, const NAME(PackedX) *x, long x_stride, const T *w, long k, ACC *sums,
                              int begins, const T *ahead, int is_half) {
    vf32 acc[PACKED_ROWS][PACKED_VECTORS];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < PACKED_VECTORS; v++) {
            acc[m][v] = (vf32){0};
            if (!begins) acc[m][v] = *(const vf32_mem *)(sums + m * GROUP + v * LANES_F32);
        }
#if defined(BF16_DOT)
    const int together = rows <= FEW_ROWS ? 1 : PACKED_VECTORS; /* one: in the order in which they lie */
    for (long step = 0; step < k; step += 32, w += 1024)
#pragma GCC unroll 2
        for (int first = 0; first < PACKED_VECTORS; first += together)
            for (int pair = 0; pair < 16; pair++) {
                __m512bh column[PACKED_VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < together; v++)
                    column[v] = (__m512bh)_mm512_loadu_si512(w + (first + v) * 512 + pair * 32);
                NAME(ask_for)(&ahead, 64 * together >> is_half);
#pragma GCC unroll 16
                for (int m = 0; m < rows; m++) {
                    int32_t two;
                    memcpy(&two, x + m * x_stride + step + 2 * pair, 4);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
                    for (int v = 0; v < together; v++)
                        acc[m][first + v] = (vf32)_mm512_dpbf16_ps((__m512)acc[m][first + v], column[v], both);
                }
            }
#elif STORAGE_IS_NARROW
    for (long step = 0; step < k; step += 32, w += 1024)
        for (int pair = 0; pair < 16; pair++) {
            vf32 even[PACKED_VECTORS], odd[PACKED_VECTORS];
            NAME(ask_for)(&ahead, 64 * PACKED_VECTORS * LANES_F32 / 16 >> is_half);
#pragma GCC unroll 4
            for (int v = 0; v < PACKED_VECTORS; v++) {
                const long output = v * LANES_F32;
                load_bf16(w + output / 16 * 512 + pair * 32 + output % 16 * 2, &even[v], &odd[v]);
            }
#pragma GCC unroll 16
            for (int m = 0; m < rows; m++) {
                const float first = x[m * x_stride + step + 2 * pair], second = x[m * x_stride + step + 2 * pair + 1];
#pragma GCC unroll 4
                for (int v = 0; v < PACKED_VECTORS; v++) acc[m][v] += even[v] * first;
#pragma GCC unroll 4
                for (int v = 0; v < PACKED_VECTORS; v++) acc[m][v] += odd[v] * second;
            }
        }
#else
    for (long i = 0; i < k; i++, w += GROUP) {
        vf32 column[PACKED_VECTORS];
        NAME(ask_for)(&ahead, 4 * PACKED_WIDTH >> is_half);
#pragma GCC unroll 4
        for (int v = 0; v < PACKED_VECTORS; v++) column[v] = *(const vf32_mem *)(w + v * LANES_F32);
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++) {
            const float one = x[m * x_stride + i];
#pragma GCC unroll 4
            for (int v = 0; v < PACKED_VECTORS; v++) acc[m][v] += column[v] * one;
        }
    }
#endif
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < PACKED_VECTORS; v++) *(vf32_mem *)(sums + m * GROUP + v * LANES_F32) = acc[m][v];
}

static void NAME(packed_tiles)(long rows, const NAME(PackedX) *x, long x_stride, const T *w, long k, ACC *sums,
                               int begins, const T *ahead, int is_half) {
#define CASE(n) case n: NAME(packed_tile)(n, x, x_stride, w, k, sums, begins, ahead, is_half); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if VEC_BYTES > 16
        CASE(5) CASE(6)
#endif
#if VEC_BYTES == 64
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

/* One group's outputs for `rows` rows. `sums`: [rows, GROUP]. */
static void NAME(packed_group)(const NAME(PackedX) *x, long x_stride, const T *w, const T *bias, Out out,
                               long rows, long k, ACC *sums) {
    const long num_tiles = (rows + PACKED_ROWS - 1) / PACKED_ROWS;
    const long block = num_tiles == 1 ? k : PACKED_BLOCK_K;
    const long ahead_bytes = rows <= FEW_ROWS ? AHEAD_OF_FEW_BYTES : AHEAD_BYTES;
    for (long begin = 0; begin < k; begin += block) {
        const long length = k - begin < block ? k - begin : block;
        for (long output = 0; output < GROUP; output += PACKED_WIDTH)
            for (long tile = 0, row = 0; tile < num_tiles; tile++) {
                const long height = rows / num_tiles + (tile < rows % num_tiles);
                const T *const from = w + NAME(packed_at)(output, begin, k);
                const T *ahead = NULL;
                if (num_tiles == 1) ahead = from + ahead_bytes / (long)sizeof(T);
                else if (tile < 2) ahead = from + (2 + tile) * length * GROUP / 2; /* the next block: half of it each */
                NAME(packed_tiles)(height, x + row * x_stride + begin, x_stride, from, length,
                                   sums + row * GROUP + output, begin == 0, ahead, num_tiles > 1);
                row += height;
            }
    }
    NAME(put_sums)(sums, GROUP, bias, out, rows, GROUP);
}
#endif

/* Whether x is read where it is. Else it goes to scratch: widened, or filled up with zeros, or because rows at a multiple
 * of a page would share cache sets. */
INLINE int NAME(reads_x_in_place)(long x_stride, long num_rows) {
#if STORAGE_IS_NARROW && defined(TILES)
    (void)x_stride, (void)num_rows;
    return 0;
#else
    return sizeof(NAME(PackedX)) == sizeof(T) && (num_rows == 1 || x_stride * (long)sizeof(T) % 1024 != 0);
#endif
}

/* Rows of x, or (where `of` is not NULL) its rows of these numbers, as the tiles read them. */
INLINE void NAME(stage_packed)(const T *x, long x_stride, const int32_t *of, long rows, long k, NAME(PackedX) *staged,
                               long stride) {
    for (long row = 0; row < rows; row++) {
        const T *const from = x + (of ? of[row] : row) * x_stride;
#if STORAGE_IS_NARROW && !defined(BF16_DOT) && !defined(TILES)
        for (long i = 0; i < k; i++) staged[row * stride + i] = TO_ACC(from[i]);
#else
        memcpy(staged + row * stride, from, (size_t)k * sizeof(T));
#endif
    }
#if STORAGE_IS_NARROW && defined(TILES)
    for (long row = rows; row < ROUND_UP(rows, TILE_ROWS_OF_X); row++)
        memset(staged + row * stride, 0, (size_t)k * sizeof(T));
#endif
}

/* A thread's working space for rows of x and a group's outputs. */
typedef struct {
    ACC *sums;             /* [rows, GROUP] */
    NAME(PackedX) *staged; /* [rows, k + 32] */
    ACC *x_sums;           /* [rows, groups of columns]: with offsets */
    ACC *made;             /* [TILE_ROWS_OF_X, GROUP]: sums that are not scaled yet */
    void *wide;            /* a block of integers, as operands of products */
} NAME(ProductSpace);
#define WIDE_BYTES (4 * PACKED_BLOCK_K * GROUP)

#include "integer_product.h"

/* `sums` is NULL where there is no memory. `form`: NULL for packed weights. */
static NAME(ProductSpace) NAME(take_space)(const Form *form, long rows, long k, int in_place) {
    const size_t sums = (size_t)(rows * GROUP) * sizeof(ACC);
    const size_t staged = in_place ? 0 : ROUND_UP((size_t)(rows * (k + 32)) * sizeof(NAME(PackedX)), 64);
    const size_t x_sums = form && form->offset ? ROUND_UP((size_t)(rows * (k / form->group_size)) * sizeof(ACC), 64) : 0;
    const size_t made = form ? 16 * GROUP * sizeof(ACC) : 0;
    char *const begin = scratch(sums + staged + x_sums + made + (form ? WIDE_BYTES : 0));
    if (!begin) return (NAME(ProductSpace)){0};
    return (NAME(ProductSpace)){(ACC *)begin, (NAME(PackedX) *)(begin + sums), (ACC *)(begin + sums + staged),
                                (ACC *)(begin + sums + staged + x_sums), begin + sums + staged + x_sums + made};
}

/* What a product with these rows reads besides weights; arguments as of stage_packed. */
INLINE void NAME(prepare_rows)(const NAME(ProductSpace) *space, const Form *form, const T *x, long x_stride, const int32_t *of,
                               long rows, long k, int in_place) {
    if (!in_place) NAME(stage_packed)(x, x_stride, of, rows, k, space->staged, k + 32);
    if (form && form->offset) NAME(sum_columns)(form, x, x_stride, of, rows, k, space->x_sums);
}

/* Group `group` of the outputs of a packed matrix, or (where `form` is not NULL) of one of integers, for rows of x as
 * tiles read them. `bias` and `out`: of the whole matrix. */
INLINE void NAME(slab_group)(const Form *form, const NAME(PackedX) *x, long x_stride, const void *w, long group,
                             const T *bias, Out out, long first_row, long rows, long k, const NAME(ProductSpace) *space) {
    const T *const of_group = bias ? bias + group * GROUP : NULL;
    const Out to = NAME(out_at)(out, first_row, group * GROUP);
    if (form)
        NAME(integer_group)(form, x, x_stride, (const uint8_t *)w + group * outputs_bytes(form, k), of_group, to, rows, k,
                            space);
    else
        NAME(packed_group)(x, x_stride, (const T *)w + group * GROUP * k, of_group, to, rows, k, space->sums);
}

typedef struct {
    const T *x;
    const void *w;
    const Form *form; /* NULL: packed */
    const T *bias;
    Out out;
    long x_stride, num_rows, k, num_groups, num_chunks, block_rows;
    int in_place, error;
} NAME(PackedProduct);

/* An item is some groups of outputs for `block_rows` rows. */
static void NAME(packed_body)(void *arguments, Draw *draw) {
    NAME(PackedProduct) *const p = arguments;
    const NAME(ProductSpace) space = NAME(take_space)(p->form, p->block_rows, p->k, p->in_place);
    long prepared_from = -1;
    if (!space.sums) __atomic_store_n(&p->error, ERROR_MEMORY, __ATOMIC_RELAXED);
    PACKED_BEGIN();
    for (long item; (item = jettison_pool_next(draw)) >= 0;) {
        if (!space.sums) continue;
        const long first_row = item / p->num_chunks * p->block_rows, chunk = item % p->num_chunks;
        const long rows = p->num_rows - first_row < p->block_rows ? p->num_rows - first_row : p->block_rows;
        const T *const block = p->x + first_row * p->x_stride;
        if (prepared_from != first_row) {
            NAME(prepare_rows)(&space, p->form, block, p->x_stride, NULL, rows, p->k, p->in_place);
            prepared_from = first_row;
        }
        const NAME(PackedX) *const from = p->in_place ? (const NAME(PackedX) *)block : space.staged;
        const long end = (chunk + 1) * p->num_groups / p->num_chunks, stride = p->in_place ? p->x_stride : p->k + 32;
        for (long group = chunk * p->num_groups / p->num_chunks; group < end; group++)
            NAME(slab_group)(p->form, from, stride, p->w, group, p->bias, p->out, first_row, rows, p->k, &space);
    }
    PACKED_END();
}

/* Rows of x that a thread takes at once: as many as the second-level cache holds beside weights. */
INLINE long NAME(packed_block_rows)(long k) {
    const long rows = (256 << 10) / (k * (long)sizeof(T)) / PACKED_ROWS * PACKED_ROWS;
    return rows < PACKED_ROWS ? PACKED_ROWS : rows > 240 ? 240 : rows;
}

/* `form` is NULL for a packed matrix; one of integers has whole groups. */
static int NAME(linear_slab)(const Form *form, const T *x, long x_stride, const void *w, const T *bias, Out out,
                             long num_rows, long n, long k, int num_threads) {
    const long num_groups = n / GROUP, done = num_groups * GROUP;
    long block_rows = NAME(packed_block_rows)(k);
    if (block_rows > num_rows) block_rows = ROUND_UP(num_rows, PACKED_ROWS);
    const long num_chunks = num_threads * PACKED_CHUNKS < num_groups ? num_threads * PACKED_CHUNKS : num_groups;
    NAME(PackedProduct) product = {x, w, form, bias, out, x_stride, num_rows, k, num_groups, num_chunks, block_rows,
                                   NAME(reads_x_in_place)(x_stride, num_rows), 0};
    if (num_groups > 0 && num_rows > 0)
        jettison_pool_run(num_threads, (num_rows + block_rows - 1) / block_rows * num_chunks, NAME(packed_body),
                          &product);
    if (!product.error && done < n)
        return NAME(linear)(x, x_stride, (const T *)w + done * k, k, bias ? bias + done : NULL, NAME(out_at)(out, 0, done),
                            num_rows, n - done, k, num_threads);
    return product.error;
}
#include "experts.h"
#undef GROUP
#undef PACKED_BLOCK_K
#undef PACKED_CHUNKS
#undef FEW_ROWS
#undef AHEAD_OF_FEW_BYTES
#undef AHEAD_IN_ORDER_BYTES
#undef AHEAD_BYTES
#undef PACKED_ROWS
#undef PACKED_VECTORS
#undef PACKED_WIDTH
#undef PACKED_BEGIN
#undef PACKED_END
#undef WIDE_BYTES

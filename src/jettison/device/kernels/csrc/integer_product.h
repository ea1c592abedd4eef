/* Products with matrices that are kept as small integers (integers.h): out = x @ w^T + bias. Part of packed.h.
 *
 * Integers are exact in bfloat16 and float32, and only sums are rounded. A sum over 32 columns (with tiles: over a segment
 * of a group) is scaled and added to its output's total; offsets come in with the sum of x over a group of columns. The
 * order is the same for every number of rows: a block of columns that serves many rows is widened once, and few rows widen
 * as they multiply, to the same bits.
 */
#define SEGMENT_STEPS 8 /* of a block that is widened at once; of a group of columns that tiles sum, at most */
#define SEGMENT (SEGMENT_STEPS * STEP * OUTPUTS) /* numbers */

/* Bytes become products' operands times 2^24 where pairs of bfloat16 are multiplied (see operand); scales take it back. */
#if STORAGE_IS_NARROW && defined(BF16_DOT)
#define OPERAND_SCALE(bits) ((bits) == 8 ? 0x1p-24f : 1.0f)
#else
#define OPERAND_SCALE(bits) 1.0f
#endif

/* What a group's scales and offsets make of its sums: total += scale * sum, and += shift * (sum of x). */
INLINE void NAME(load_head)(const Form *form, const uint8_t *head, vf32 *scale, vf32 *shift) {
#pragma GCC unroll 4
    for (int v = 0; v < PACKED_VECTORS; v++) {
        scale[v] = head_numbers(head + 2 * v * LANES_F32, form->is_bfloat16);
        shift[v] = (vf32){0};
        if (form->offset) {
            const vf32 offset = head_numbers(head + 2 * (OUTPUTS + v * LANES_F32), form->is_bfloat16);
            shift[v] = form->offset == OFFSET_MIN ? add_product(offset, scale[v], broadcast_f32(8)) : scale[v] * offset;
        }
        scale[v] *= OPERAND_SCALE(form->bits);
    }
}

/* ---- integers as operands of products ---- */

#if STORAGE_IS_NARROW && defined(BF16_DOT)
#define OPERAND_COLUMNS 2
typedef T NAME(Wide); /* widened, in the order of a packed matrix */
typedef __m512bh NAME(Operand);

/* A pair of columns of half a line: 16 outputs. */
INLINE __m512bh NAME(operand)(const int bits, const uint8_t *half, const int pair) {
    const __m512i from = _mm512_loadu_si512(half);
    if (bits == 4) { /* an index is five bits: two copies of the table */
        const __m512i table = _mm512_broadcast_i64x4(_mm256_set_epi64x(
            0xbf80c000c040c080, 0xc0a0c0c0c0e0c100, 0x40e040c040a04080, 0x404040003f800000));
        return (__m512bh)_mm512_permutexvar_epi16(pair ? _mm512_srli_epi16(from, 4 * pair) : from, table);
    }
    /* Each byte becomes the highest of 32 bits, which leaves out shifts back. Shuffles take the place of shifts, which
     * share their ports with conversions. */
    const __m512i second = _mm512_broadcast_i32x4(_mm_set_epi32(0x0dffffff, 0x09ffffff, 0x05ffffff, 0x01ffffff));
    const __m512i third = _mm512_broadcast_i32x4(_mm_set_epi32(0x0effffff, 0x0affffff, 0x06ffffff, 0x02ffffff));
    const __m512i upper = _mm512_broadcast_i32x4(
        _mm_set_epi32((int)0xffff0f0e, (int)0xffff0b0a, (int)0xffff0706, (int)0xffff0302));
    const __m512i fourth = _mm512_set1_epi32((int)0xff000000);
    const __m512i even = pair ? _mm512_shuffle_epi8(from, second) : _mm512_slli_epi32(from, 24);
    const __m512i odd = pair ? _mm512_and_si512(from, fourth) : _mm512_shuffle_epi8(from, third);
    const __m512i low = _mm512_shuffle_epi8((__m512i)_mm512_cvtepi32_ps(even), upper);
    return (__m512bh)_mm512_or_si512(low, (__m512i)_mm512_cvtepi32_ps(odd));
}
INLINE long NAME(wide_at)(long output, long i) { return i / 16 * STEP * OUTPUTS + output / 16 * 512 + i % 16 * 32; }
INLINE __m512bh NAME(load_wide)(const T *at) { return (__m512bh)_mm512_loadu_si512(at); }
INLINE void NAME(store_wide)(T *at, __m512bh operand) { _mm512_storeu_si512(at, (__m512i)operand); }
INLINE vf32 NAME(multiply_add)(vf32 sum, __m512bh operand, const T *x) {
    int32_t two;
    memcpy(&two, x, 4);
    return (vf32)_mm512_dpbf16_ps((__m512)sum, operand, (__m512bh)_mm512_set1_epi32(two));
}
#else
#define OPERAND_COLUMNS 1
typedef ACC NAME(Wide);
typedef vf32 NAME(Operand);

/* A column of some outputs of a line. */
INLINE vf32 NAME(operand)(const int bits, const uint8_t *part, const int column) {
    const vu32 from = *(const vu32_mem *)part;
    const int at = column % 2 * 16 + column / 2 * bits;
#if VEC_BYTES == 64
    if (bits == 4) {
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        return (vf32)_mm512_permutexvar_ps((__m512i)(from >> at), table);
    }
#endif
    return __builtin_convertvector((vi32)(from << (32 - bits - at)) >> (32 - bits), vf32);
}
INLINE long NAME(wide_at)(long output, long i) { return i * OUTPUTS + output; }
INLINE vf32 NAME(load_wide)(const ACC *at) { return *(const vf32_mem *)at; }
INLINE void NAME(store_wide)(ACC *at, vf32 operand) { *(vf32_mem *)at = operand; }
INLINE vf32 NAME(multiply_add)(vf32 sum, vf32 operand, const ACC *x) { return add_product(sum, operand, broadcast_f32(*x)); }
#endif
#define LINE_OPERANDS(bits) (32 / (bits) / OPERAND_COLUMNS)
#define STEP_OPERANDS (STEP / OPERAND_COLUMNS)

#if STORAGE_IS_NARROW && defined(TILES)
#if defined(BF16_DOT)
/* Steps of a group of columns, of which `line` is the first line. */
INLINE void NAME(widen_lines)(const int bits, const uint8_t *line, long num_steps, NAME(Wide) *wide) {
    for (long i = 0; i < num_steps * STEP_OPERANDS; i += LINE_OPERANDS(bits), line += LINE_BYTES)
        for (long output = 0; output < OUTPUTS; output += LANES_F32)
#pragma GCC unroll 8
            for (int j = 0; j < LINE_OPERANDS(bits); j++)
                NAME(store_wide)(wide + NAME(wide_at)(output, i + j), NAME(operand)(bits, line + 4 * output, j));
}
#else
/* Tiles without the instructions that make their operands: the model of tiles.h. */
INLINE void NAME(widen_lines)(const int bits, const uint8_t *line, long num_steps, T *wide) {
    for (long i = 0; i < num_steps * STEP; i++)
        for (long output = 0; output < OUTPUTS; output++) {
            const long j = i % (32 / bits);
            uint32_t four;
            memcpy(&four, line + i / (32 / bits) * LINE_BYTES + 4 * output, 4);
            wide[i / STEP * STEP * OUTPUTS + output / 16 * 512 + i % STEP / 2 * 32 + output % 16 * 2 + i % 2] =
                f32_to_bf16((float)integer_at(four, bits, (int)j));
        }
}
#endif
static void NAME(widen_steps)(const Form *form, const uint8_t *line, long num_steps, void *wide) {
    if (form->bits == 4) NAME(widen_lines)(4, line, num_steps, wide);
    else NAME(widen_lines)(8, line, num_steps, wide);
}

/* Sums of a segment become part of totals, with the offsets of its group of columns where `x_sums` is not NULL. */
static void NAME(scale_sums)(const Form *form, const uint8_t *head, const ACC *made, long rows, const ACC *x_sums,
                             long x_sums_stride, ACC *totals) {
    for (long output = 0; output < OUTPUTS; output += PACKED_WIDTH) {
        vf32 scale[PACKED_VECTORS], shift[PACKED_VECTORS];
        NAME(load_head)(form, head + 2 * output, scale, shift);
        for (long m = 0; m < rows; m++)
            for (int v = 0; v < PACKED_VECTORS; v++) {
                const long at = m * OUTPUTS + output + v * LANES_F32;
                vf32 total = *(vf32_mem *)(totals + at);
                if (x_sums) total = add_product(total, shift[v], broadcast_f32(x_sums[m * x_sums_stride]));
                *(vf32_mem *)(totals + at) = add_product(total, scale[v], *(const vf32_mem *)(made + at));
            }
    }
}

/* 32 outputs for `rows` rows, of which x has a multiple of TILE_ROWS_OF_X. */
static void NAME(integer_group)(const Form *form, const T *x, long x_stride, const uint8_t *w, const T *bias, Out out,
                                long rows, long k, const NAME(ProductSpace) *space) {
    const long x_bytes = x_stride * (long)sizeof(T), groups = k / form->group_size, steps = form->group_size / STEP;
    ACC *const made = space->made;
    const T *const wide = space->wide;
    memset(space->sums, 0, (size_t)(rows * OUTPUTS) * sizeof(ACC));
    for (long group = 0; group < groups; group++, w += columns_bytes(form))
        for (long begin = 0; begin < steps; begin += SEGMENT_STEPS) {
            const long length = steps - begin < SEGMENT_STEPS ? steps - begin : SEGMENT_STEPS;
            const T *from = x + (group * steps + begin) * STEP;
            NAME(widen_steps)(form, w + head_bytes(form) + begin * STEP_BYTES(form->bits), length, space->wide);
            for (long row = 0; row < rows; row += TILE_ROWS_OF_X, from += TILE_ROWS_OF_X * x_stride) {
                TILE_ZERO(0); TILE_ZERO(1);
                for (long step = 0; step < length; step++) {
                    TILE_LOAD(6, wide + step * STEP * OUTPUTS, 64);
                    TILE_LOAD(7, wide + step * STEP * OUTPUTS + 512, 64);
                    TILE_LOAD(4, from + step * STEP, x_bytes);
                    TILE_MULTIPLY(0, 4, 6);
                    TILE_MULTIPLY(1, 4, 7);
                }
                TILE_STORE(0, made, OUTPUTS * 4);
                TILE_STORE(1, made + 16, OUTPUTS * 4);
                const ACC *const x_sums = form->offset && begin == 0 ? space->x_sums + row * groups + group : NULL;
                NAME(scale_sums)(form, w, made, rows - row < TILE_ROWS_OF_X ? rows - row : TILE_ROWS_OF_X, x_sums,
                                 groups, space->sums + row * OUTPUTS);
            }
        }
    NAME(put_sums)(space->sums, OUTPUTS, bias, out, rows, OUTPUTS);
}
#else
/* Columns of a tile of some rows by PACKED_WIDTH outputs. */
typedef struct {
    const Form *form;
    const NAME(PackedX) *x; /* at the first of the columns */
    const ACC *x_sums;      /* at the first of their groups */
    const uint8_t *head;    /* of that group */
    NAME(Wide) *wide;       /* for the columns widened; or NULL */
    ACC *sums;
    long output, x_stride, num_groups, first_step, num_steps; /* num_groups: of a row; first_step: in its group */
    long ahead;                                               /* bytes from a line to what is asked for with it */
    const uint8_t *next;                                      /* the block that a tile asks for; or NULL */
} NAME(Columns);

/* A register tile of few enough rows has its totals in registers, too, beside the sums of a step. Wide registers would
 * wait for memory: they ask less far ahead than for packed weights, whose bytes are used up sooner, and the second tile
 * of a block `ASKS` for the next one, which its first tile alone reads. */
#if VEC_BYTES == 64
#define INTEGER_ROWS 6
#define TOTALS_IN_REGISTERS 6
#define ASKS 1
#define AHEAD_OF(rows) ((rows) <= FEW_ROWS ? AHEAD_IN_ORDER_BYTES : 2048)
#else
#define INTEGER_ROWS PACKED_ROWS
#define TOTALS_IN_REGISTERS 1
#define ASKS 0
#define AHEAD_OF(rows) ((rows) <= FEW_ROWS ? AHEAD_OF_FEW_BYTES : AHEAD_BYTES)
#endif

/* Adds to sums. `bits` is 0 where the columns have been widened. A tile that `serves` others widens for them, too, or
 * (without bits) asks for the next block. */
INLINE void NAME(integer_tile)(const int rows, const int bits, const int serves, const NAME(Columns) *c) {
    const int in_registers = rows <= TOTALS_IN_REGISTERS;
    const long steps = c->form->group_size / STEP;
    const NAME(PackedX) *x = c->x;
    NAME(Wide) *wide = c->wide + (bits && !serves ? 0 : NAME(wide_at)(c->output, 0));
    const ACC *x_sums = c->x_sums;
    const uint8_t *next = c->next;
    const uint8_t *head = c->head, *line = head + head_bytes(c->form) + c->first_step * STEP_BYTES(bits) + 4 * c->output;
    ACC *const sums = c->sums + c->output;
    vf32 total[TOTALS_IN_REGISTERS][PACKED_VECTORS], scale[PACKED_VECTORS], shift[PACKED_VECTORS];
    NAME(load_head)(c->form, head + 2 * c->output, scale, shift);
    if (in_registers)
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int v = 0; v < PACKED_VECTORS; v++) total[m][v] = *(vf32_mem *)(sums + m * OUTPUTS + v * LANES_F32);
    for (long step = 0, in_group = c->first_step; step < c->num_steps; step++, in_group++, x += STEP) {
        if (in_group == steps) {
            in_group = 0;
            head += columns_bytes(c->form);
            line += head_bytes(c->form);
            x_sums++;
            NAME(load_head)(c->form, head + 2 * c->output, scale, shift);
        }
        if (!bits && serves)
            for (const uint8_t *const end = next + STEP_BYTES(c->form->bits) + 64; next < end; next += 64)
                __builtin_prefetch(next, 0, 2);
        vf32 acc[INTEGER_ROWS][PACKED_VECTORS];
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int v = 0; v < PACKED_VECTORS; v++) acc[m][v] = (vf32){0};
        const int together = bits ? LINE_OPERANDS(bits) : 4 / OPERAND_COLUMNS;
        for (int i = 0; i < STEP_OPERANDS; i += together) {
            if (bits) {
                __builtin_prefetch(line + c->ahead, 0, 2);
                if (PACKED_WIDTH > 16) __builtin_prefetch(line + c->ahead + 64, 0, 2);
            }
#pragma GCC unroll 8
            for (int j = 0; j < together; j++) {
                NAME(Operand) column[PACKED_VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < PACKED_VECTORS; v++) {
                    NAME(Wide) *const at = wide + NAME(wide_at)(v * LANES_F32, i + j);
                    column[v] = bits ? NAME(operand)(bits, line + 4 * v * LANES_F32, j) : NAME(load_wide)(at);
                    if (bits && serves) NAME(store_wide)(at, column[v]);
                }
#pragma GCC unroll 16
                for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
                    for (int v = 0; v < PACKED_VECTORS; v++)
                        acc[m][v] = NAME(multiply_add)(acc[m][v], column[v], x + m * c->x_stride + (i + j) * OPERAND_COLUMNS);
            }
            line += LINE_BYTES;
        }
        wide += STEP * OUTPUTS;
        if (c->form->offset && in_group == 0)
#pragma GCC unroll 16
            for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
                for (int v = 0; v < PACKED_VECTORS; v++) {
                    vf32_mem *const at = (vf32_mem *)(sums + m * OUTPUTS + v * LANES_F32);
                    const vf32 sum = in_registers ? total[m][v] : (vf32)*at;
                    const vf32 shifted = add_product(sum, shift[v], broadcast_f32(x_sums[m * c->num_groups]));
                    if (in_registers) total[m][v] = shifted;
                    else *at = shifted;
                }
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int v = 0; v < PACKED_VECTORS; v++) {
                vf32_mem *const at = (vf32_mem *)(sums + m * OUTPUTS + v * LANES_F32);
                if (in_registers) total[m][v] = add_product(total[m][v], scale[v], acc[m][v]);
                else *at = add_product(*at, scale[v], acc[m][v]);
            }
    }
    if (in_registers)
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int v = 0; v < PACKED_VECTORS; v++) *(vf32_mem *)(sums + m * OUTPUTS + v * LANES_F32) = total[m][v];
}

/* A function for each number of rows: GCC allocates registers worse where a function has many loops. */
#define TILES_OF(n)                                                                                                  \
    static __attribute__((noinline)) void NAME(integer_tiles_##n)(int is_first, const NAME(Columns) *c) {            \
        const int is_nibbles = c->form->bits == 4;                                                                   \
        if (!c->wide && is_nibbles) NAME(integer_tile)(n, 4, 0, c);                                                  \
        else if (!c->wide) NAME(integer_tile)(n, 8, 0, c);                                                           \
        else if (ASKS && n > 1 && c->next) NAME(integer_tile)(n, 0, 1, c);                                           \
        else if (n > 1 && !is_first) NAME(integer_tile)(n, 0, 0, c);                                                 \
        else if (n > 2 && is_nibbles) NAME(integer_tile)(n, 4, 1, c);                                                \
        else if (n > 2) NAME(integer_tile)(n, 8, 1, c);                                                              \
    }
TILES_OF(1) TILES_OF(2) TILES_OF(3) TILES_OF(4)
#if VEC_BYTES > 16
TILES_OF(5) TILES_OF(6)
#endif
#undef TILES_OF

static void NAME(integer_tiles)(long rows, int is_first, const NAME(Columns) *c) {
#define CASE(n) case n: NAME(integer_tiles_##n)(is_first, c); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if VEC_BYTES > 16
        CASE(5) CASE(6)
#endif
    }
#undef CASE
}

/* 32 outputs for `rows` rows. */
static void NAME(integer_group)(const Form *form, const NAME(PackedX) *x, long x_stride, const uint8_t *w, const T *bias,
                                Out out, long rows, long k, const NAME(ProductSpace) *space) {
    const long num_tiles = (rows + INTEGER_ROWS - 1) / INTEGER_ROWS, steps = form->group_size / STEP;
    const long block = num_tiles == 1 ? k / STEP : SEGMENT_STEPS;
    memset(space->sums, 0, (size_t)(rows * OUTPUTS) * sizeof(ACC));
    for (long begin = 0; begin < k / STEP; begin += block) {
        const long length = k / STEP - begin < block ? k / STEP - begin : block, group = begin / steps;
        const long end = begin + length;
        const uint8_t *const head = w + group * columns_bytes(form);
        const uint8_t *const next = w + end / steps * columns_bytes(form) + end % steps * STEP_BYTES(form->bits);
        NAME(Columns) c = {form, NULL, NULL, head, NULL, NULL, 0, x_stride, k / form->group_size, begin % steps, length,
                           AHEAD_OF(rows), NULL};
        if (num_tiles > 1) c.wide = space->wide;
        for (c.output = 0; c.output < OUTPUTS; c.output += PACKED_WIDTH)
            for (long tile = 0, row = 0; tile < num_tiles; tile++) {
                const long height = rows / num_tiles + (tile < rows % num_tiles);
                c.x = x + row * x_stride + begin * STEP;
                c.x_sums = space->x_sums + row * c.num_groups + group;
                c.sums = space->sums + row * OUTPUTS;
                c.next = tile == 1 ? next : NULL;
                NAME(integer_tiles)(height, tile == 0, &c);
                row += height;
            }
    }
    NAME(put_sums)(space->sums, OUTPUTS, bias, out, rows, OUTPUTS);
}
#endif

/* ---- rows, and sums of x ---- */

/* Rows of weights, rounded once: out[i] = row ids[i], which the caller has checked. */
static void NAME(gather_integers)(const Form *form, const uint8_t *packed, long k, const int64_t *ids, long count,
                                  T *out, long stride) {
    const int bits = (int)form->bits;
    for (long i = 0; i < count; i++) {
        const long lane = ids[i] % OUTPUTS;
        const uint8_t *head = packed + ids[i] / OUTPUTS * outputs_bytes(form, k);
        T *to = out + i * stride;
        for (long group = 0; group < k / form->group_size; group++, head += columns_bytes(form)) {
            const ACC scale = head_number(head, lane, form->is_bfloat16);
            const ACC offset = form->offset ? head_number(head, OUTPUTS + lane, form->is_bfloat16) : 0;
            const ACC inside = form->offset == OFFSET_ZERO ? offset : form->offset == OFFSET_MIN ? 8 : 0;
            const ACC outside = form->offset == OFFSET_MIN ? offset : 0;
            const uint8_t *line = head + head_bytes(form) + 4 * lane;
            for (long c = 0; c < form->group_size; c += 32 / bits, line += LINE_BYTES) {
                uint32_t four;
                memcpy(&four, line, 4);
                for (int j = 0; j < 32 / bits; j++)
                    *to++ = FROM_ACC(scale * ((ACC)integer_at(four, bits, j) + inside) + outside);
            }
        }
    }
}

/* Sums of x over each group of columns, which offsets are multiplied by: [rows, k / group_size]. */
static void NAME(sum_columns)(const Form *form, const T *x, long x_stride, const int32_t *of, long rows, long k,
                              ACC *sums) {
    for (long row = 0; row < rows; row++)
        for (long begin = 0; begin < k; begin += form->group_size) {
            const T *restrict from = x + (of ? of[row] : row) * x_stride + begin;
            ACC sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long i = 0; i < form->group_size; i++) sum += TO_ACC(from[i]);
            *sums++ = sum;
        }
}
#undef SEGMENT
#undef SEGMENT_STEPS
#undef AHEAD_OF
#undef ASKS
#undef OPERAND_SCALE
#undef INTEGER_ROWS
#undef TOTALS_IN_REGISTERS
#undef OPERAND_COLUMNS
#undef LINE_OPERANDS
#undef STEP_OPERANDS

/* Attention of one item where there are products of pairs of bfloat16 (VDPBF16PS, or tiles), in place of
 * attention_tile.h.
 *
 * A tile of keys is turned first (pairs of the head's dimension by keys), and one of values is taken in pairs of
 * positions: both are then what the second operand of such a product is, with a lane a key or a column. The rows of an
 * item meet them in strips: scores, weights relative to the running maximum, and sums of values, while a strip's
 * numbers are in the first-level cache. A score is one chain of sums over ascending pairs, a column of the result one
 * over ascending positions, whatever the number of rows. Weights are powers of two (exp(x) = 2^(x log2 e)), and are
 * rounded to bfloat16 for the sum over values.
 */
#if defined(TILES)
#define STRIP TILE_ROWS_OF_X
#else
#define STRIP 6 /* with 4 vectors of keys or columns: 24 sums in registers */
#endif
#define SPACE_ROWS ROUND_UP(MAX_QUERIES, STRIP)

typedef struct {
    T *q, *turned, *paired;     /* [SPACE_ROWS, width], [width / 2, KEY_TILE, 2], [KEY_TILE / 2, width, 2] */
    ACC *out, *totals, *scores; /* [SPACE_ROWS, width], [SPACE_ROWS, LANES_F32], [STRIP, KEY_TILE] */
    T *weights;                 /* [STRIP, KEY_TILE] */
} NAME(Space);

static size_t NAME(space)(char *base, long width, NAME(Space) *s) {
    const size_t rows = SPACE_ROWS * (size_t)width, tile = KEY_TILE * (size_t)width, square = STRIP * KEY_TILE;
    if (base) {
        s->out = (ACC *)base;
        s->totals = s->out + rows;
        s->scores = s->totals + SPACE_ROWS * LANES_F32;
        s->q = (T *)(s->scores + square);
        s->turned = s->q + rows;
        s->paired = s->turned + tile;
        s->weights = s->paired + tile;
    }
    return (rows + SPACE_ROWS * LANES_F32 + square) * sizeof(ACC) + (rows + 2 * tile + square) * sizeof(T);
}

/* Which of 32 columns from `at` on a head of `dim` has. */
INLINE __mmask32 columns_there(long at, long dim) { return dim - at >= 32 ? 0xffffffffu : (1u << (dim - at)) - 1; }

/* 32 columns from `at` on of a head of `dim`, zeros beyond it. */
INLINE __m512i columns_of_head(const T *head, long at, long dim) {
    return _mm512_maskz_loadu_epi16(columns_there(at, dim), head + at);
}

/* 16 keys by 16 pairs to 16 pairs by 16 keys. For each cache line that is read, the same one of `next` is asked for,
 * here and below: never more at once than a core can wait for. */
INLINE void turn_block(const T *const *keys, const T *const *next, long at, long dim, T *turned) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        r[i] = columns_of_head(keys[i], at, dim);
        __builtin_prefetch(next[i] + at, 0, 3);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* r[4 g + c] has, in its 128-bit lane l, pair 4 l + c of keys 4 g to 4 g + 3. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(turned + (0 + c) * 2 * KEY_TILE, _mm512_shuffle_i32x4(a, d, 0x88));
        _mm512_storeu_si512(turned + (8 + c) * 2 * KEY_TILE, _mm512_shuffle_i32x4(a, d, 0xdd));
        _mm512_storeu_si512(turned + (4 + c) * 2 * KEY_TILE, _mm512_shuffle_i32x4(b, e, 0x88));
        _mm512_storeu_si512(turned + (12 + c) * 2 * KEY_TILE, _mm512_shuffle_i32x4(b, e, 0xdd));
    }
}

static void turn_keys(const T *const *keys, const T *const *next, long count, long dim, T *turned) {
    for (long at = 0; at < dim; at += 32)
        for (long j = 0; j < count; j += 16) turn_block(keys + j, next + j, at, dim, turned + at * KEY_TILE + 2 * j);
}

static void pair_values(const T *const *values, const T *const *next, long count, long dim, long width, T *paired) {
    int16_t order[64];
    for (int i = 0; i < 32; i++) {
        order[2 * i] = (int16_t)i;
        order[2 * i + 1] = (int16_t)(32 + i);
    }
    const __m512i lower = _mm512_loadu_si512(order), upper = _mm512_loadu_si512(order + 32);
    for (long j = 0; j < count; j += 2, paired += 2 * width)
        for (long at = 0; at < dim; at += 32) {
            const __m512i first = columns_of_head(values[j], at, dim), second = columns_of_head(values[j + 1], at, dim);
            __builtin_prefetch(next[j] + at, 0, 3);
            __builtin_prefetch(next[j + 1] + at, 0, 3);
            _mm512_storeu_si512(paired + 2 * at, _mm512_permutex2var_epi16(first, lower, second));
            _mm512_storeu_si512(paired + 2 * at + 32, _mm512_permutex2var_epi16(first, upper, second));
        }
}

#if defined(TILES)
/* scores[m][0..63] of a strip. */
static void strip_scores(long rows, long num_keys, const T *q, long width, const T *turned, ACC *scores) {
    (void)rows, (void)num_keys;
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    for (long i = 0; i < width; i += 32, turned += 32 * KEY_TILE) {
        TILE_LOAD(4, q + i, width * 2);
        TILE_LOAD(5, turned, KEY_TILE * 4);
        TILE_LOAD(6, turned + 32, KEY_TILE * 4);
        TILE_MULTIPLY(0, 4, 5);
        TILE_MULTIPLY(1, 4, 6);
        TILE_LOAD(5, turned + 64, KEY_TILE * 4);
        TILE_LOAD(6, turned + 96, KEY_TILE * 4);
        TILE_MULTIPLY(2, 4, 5);
        TILE_MULTIPLY(3, 4, 6);
    }
    TILE_STORE(0, scores, KEY_TILE * 4);
    TILE_STORE(1, scores + 16, KEY_TILE * 4);
    TILE_STORE(2, scores + 32, KEY_TILE * 4);
    TILE_STORE(3, scores + 48, KEY_TILE * 4);
}

/* out[m] += weights[m] . values of a strip. */
static void strip_values(long rows, const T *weights, const T *paired, long count, long width, ACC *out) {
    (void)rows;
    for (long column = 0; column < width; column += 32) {
        TILE_LOAD(0, out + column, width * 4);
        TILE_LOAD(1, out + column + 16, width * 4);
        for (long j = 0; j < count; j += 32) {
            TILE_LOAD(4, weights + j, KEY_TILE * 2);
            TILE_LOAD(5, paired + j * width + 2 * column, width * 4);
            TILE_LOAD(6, paired + j * width + 2 * column + 32, width * 4);
            TILE_MULTIPLY(0, 4, 5);
            TILE_MULTIPLY(1, 4, 6);
        }
        TILE_STORE(0, out + column, width * 4);
        TILE_STORE(1, out + column + 16, width * 4);
    }
}
#else
INLINE __m512bh load_pairs(const T *p) { return (__m512bh)_mm512_loadu_si512(p); }

INLINE __m512bh one_pair(const T *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return (__m512bh)_mm512_set1_epi32(two);
}

/* acc[m][v] += left[m] . right[v] over `steps` pairs: mr rows, `left_stride` apart, by nv vectors, `right_stride` a
 * step. */
INLINE void multiply_pairs(const int mr, const int nv, const T *left, long left_stride, const T *right,
                           long right_stride, long steps, __m512 acc[STRIP][4]) {
    for (long i = 0; i < steps; i++, left += 2, right += right_stride) {
        __m512bh vectors[4];
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) vectors[v] = load_pairs(right + 32 * v);
#pragma GCC unroll 6
        for (int m = 0; m < mr; m++) {
            const __m512bh pair = one_pair(left + m * left_stride);
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], pair, vectors[v]);
        }
    }
}

INLINE void store_sums(const int mr, const int nv, __m512 acc[STRIP][4], ACC *out, long stride) {
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) _mm512_storeu_ps(out + m * stride + LANES_F32 * v, acc[m][v]);
}

/* scores[m] of mr rows against LANES_F32 * nv keys. */
INLINE void some_scores(const int mr, const int nv, const T *q, long width, const T *turned, ACC *scores) {
    __m512 acc[STRIP][4];
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) acc[m][v] = _mm512_setzero_ps();
    multiply_pairs(mr, nv, q, width, turned, 2 * KEY_TILE, width / 2, acc);
    store_sums(mr, nv, acc, scores, KEY_TILE);
}

/* out[m] += weights[m] . values, for mr rows and LANES_F32 * nv columns. */
INLINE void some_values(const int mr, const int nv, const T *weights, const T *paired, long count, long width,
                        ACC *out) {
    __m512 acc[STRIP][4];
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) acc[m][v] = _mm512_loadu_ps(out + m * width + LANES_F32 * v);
    multiply_pairs(mr, nv, weights, KEY_TILE, paired, 2 * width, (count + 1) / 2, acc);
    store_sums(mr, nv, acc, out, width);
}

INLINE void rows_of_scores(const int mr, long num_keys, const T *q, long width, const T *turned, ACC *scores) {
    if (num_keys > 2 * LANES_F32) some_scores(mr, 4, q, width, turned, scores);
    else some_scores(mr, 2, q, width, turned, scores);
}

INLINE void rows_of_values(const int mr, const T *weights, const T *paired, long count, long width, ACC *out) {
    long column = 0;
    for (; column + 64 <= width; column += 64)
        some_values(mr, 4, weights, paired + 2 * column, count, width, out + column);
    if (column < width) some_values(mr, 2, weights, paired + 2 * column, count, width, out + column);
}

#define BY_ROWS(rows, function, ...)                                                                                 \
    switch (rows) {                                                                                                  \
    case 1: function(1, __VA_ARGS__); break;                                                                         \
    case 2: function(2, __VA_ARGS__); break;                                                                         \
    case 3: function(3, __VA_ARGS__); break;                                                                         \
    case 4: function(4, __VA_ARGS__); break;                                                                         \
    case 5: function(5, __VA_ARGS__); break;                                                                         \
    default: function(6, __VA_ARGS__); break;                                                                        \
    }

static void strip_scores(long rows, long num_keys, const T *q, long width, const T *turned, ACC *scores) {
    BY_ROWS(rows, rows_of_scores, num_keys, q, width, turned, scores)
}

static void strip_values(long rows, const T *weights, const T *paired, long count, long width, ACC *out) {
    BY_ROWS(rows, rows_of_values, weights, paired, count, width, out)
}
#undef BY_ROWS
#endif

/* 2^x by its Taylor series on [-1/2, 1/2] (truncated at an ulp); 0 from -150 down; NaN gives NaN. */
INLINE __m512 two_to(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5403530e-4f); /* ln(2)^k / k! */
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* One row's scores of a tile of LANES_F32 * nv keys, of which it sees those from `hidden` to before `valid`, to weights
 * relative to the running maximum (of score times `factor`, as powers of two); what was summed so far is rescaled.
 * `total`: LANES_F32 sums, added at the end. */
INLINE void weigh(const int nv, const ACC *scores, long hidden, long valid, ACC factor, ACC *maximum, ACC *total,
                  ACC *out, long width, T *weights) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 x[4], largest = _mm512_set1_ps(-INFINITY);
    __mmask16 seen[4];
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++)
        seen[v] = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32((int)valid - LANES_F32 * v));
    if (hidden > 0)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++)
            seen[v] = _mm512_mask_cmpge_epi32_mask(seen[v], lane, _mm512_set1_epi32((int)hidden - LANES_F32 * v));
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) {
        x[v] = _mm512_loadu_ps(scores + LANES_F32 * v);
        largest = _mm512_mask_max_ps(largest, seen[v], largest, x[v]);
    }
    const ACC tile_max = _mm512_reduce_max_ps(largest) * factor;
    const ACC before = *maximum, now = tile_max > before ? tile_max : before;
    __m512 shrink = _mm512_set1_ps(1.0f);
    if (now != before) {
        *maximum = now;
        shrink = two_to(_mm512_set1_ps(before - now)); /* 0 on the first tile */
        for (long i = 0; i < width; i += LANES_F32)
            _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), shrink));
    }
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++)
        x[v] = _mm512_maskz_mov_ps(
            seen[v], two_to(_mm512_fmsub_ps(x[v], _mm512_set1_ps(factor), _mm512_set1_ps(now))));
    __m512 sum = _mm512_add_ps(x[0], x[1]);
    if (nv == 4) sum = _mm512_add_ps(sum, _mm512_add_ps(x[2], x[3]));
    _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), shrink, sum));
#pragma GCC unroll 2
    for (int v = 0; v < nv; v += 2) /* the first of the two is the upper half */
        _mm512_storeu_si512(weights + LANES_F32 * v, (__m512i)_mm512_cvtne2ps_pbh(x[v + 1], x[v]));
}

/* One row's sums of values times `factor`, stored. */
INLINE void store_row(const ACC *sums, ACC factor, long dim, T *out) {
    const __m512 by = _mm512_set1_ps(factor);
    for (long i = 0; i < dim; i += 32) {
        const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums + i), by);
        const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sums + i + LANES_F32), by);
        _mm512_mask_storeu_epi16(out + i, columns_there(i, dim), (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* Where keys and values of a tile lie; before the first of them and beyond the last, these are repeated. Where there are
 * none, the addresses are any of the arena's. */
static void locate_tile(const NAME(Cache) *c, const NAME(Keys) *k, long tile, const T **keys, const T **values) {
    const long count = k->end - tile < KEY_TILE ? k->end - tile : KEY_TILE;
    const long skipped = k->first > tile ? k->first - tile : 0;
    if (count > skipped) {
        NAME(locate)(c, k->table, k->kv_head, tile + skipped, count - skipped, keys + skipped);
        for (long j = 0; j < skipped; j++) keys[j] = keys[skipped];
        for (long j = count; j < KEY_TILE; j++) keys[j] = keys[count - 1];
    } else
        for (long j = 0; j < KEY_TILE; j++) keys[j] = c->arena;
    for (long j = 0; j < KEY_TILE; j++) values[j] = keys[j] + c->kv_heads * c->block_size * c->head_dim;
}

/* As the `attend` of attention.h; `scale` is above 0. */
static void NAME(attend)(const NAME(Cache) *c, const int32_t *table, long kv_head, const NAME(Sight) *seen,
                         long num_tokens, long group, const T *q, long q_stride, T *out, long out_stride, ACC *lse,
                         long lse_stride, const NAME(Scores) *how, const NAME(Keys) *next, NAME(Space) *s) {
    const long dim = c->head_dim, width = ROUND_UP(dim, 32), rows = num_tokens * group;
    const ACC factor = (how->softcap > 0 ? 1 : how->scale) * 1.44269504088896341f;
    ACC maximum[MAX_QUERIES];
    const size_t all_rows = ROUND_UP(rows, STRIP);
    memset(s->q, 0, all_rows * (size_t)width * sizeof(T));
    memset(s->out, 0, all_rows * (size_t)width * sizeof(ACC));
    memset(s->totals, 0, all_rows * LANES_F32 * sizeof(ACC));
    for (long m = 0; m < rows; m++) {
        memcpy(s->q + m * width, q + m / group * q_stride + m % group * dim, (size_t)dim * sizeof(T));
        maximum[m] = -INFINITY;
    }
#if defined(TILES)
    tiles_begin();
#endif
    const NAME(Keys) all = NAME(keys_of)(seen, table, kv_head, num_tokens);
    const T *keys[2][KEY_TILE], *values[2][KEY_TILE];
    int now = 0;
    locate_tile(c, &all, NAME(first_tile)(&all), keys[now], values[now]);
    for (long tile = NAME(first_tile)(&all); tile < all.end; tile += KEY_TILE, now = !now) {
        const long count = all.end - tile < KEY_TILE ? all.end - tile : KEY_TILE;
        const int ahead = !now;
        if (tile + KEY_TILE < all.end) locate_tile(c, &all, tile + KEY_TILE, keys[ahead], values[ahead]);
        else locate_tile(c, next, NAME(first_tile)(next), keys[ahead], values[ahead]);
        const long padded = count > 2 * LANES_F32 ? KEY_TILE : 2 * LANES_F32;
        turn_keys(keys[now], keys[ahead], padded, dim, s->turned);
        pair_values(values[now], values[ahead], padded, dim, width, s->paired);
        const long begin = seen->first - tile, end = seen->end - tile; /* of the first token's keys in this tile */
        const int hides = begin + num_tokens > 1;
        for (long first = 0; first < rows; first += STRIP) {
            const long left = rows - first < STRIP ? rows - first : STRIP;
            if (end + (seen->grows ? (first + left - 1) / group : 0) <= 0) continue;
            if (hides && begin + first / group >= count) continue;
            strip_scores(left, padded, s->q + first * width, width, s->turned, s->scores);
            NAME(cap_scores)(s->scores, left * KEY_TILE, how);
            for (long i = 0, m = first; i < left; i++, m++) {
                const ACC *const scores = s->scores + i * KEY_TILE;
                T *const weights = s->weights + i * KEY_TILE;
                ACC *const total = s->totals + m * LANES_F32, *const sums = s->out + m * width;
                const long hidden = hides ? begin + m / group : 0, valid = end + (seen->grows ? m / group : 0);
                if (padded == KEY_TILE)
                    weigh(4, scores, hidden, valid, factor, maximum + m, total, sums, width, weights);
                else weigh(2, scores, hidden, valid, factor, maximum + m, total, sums, width, weights);
            }
            strip_values(left, s->weights, s->paired, count, width, s->out + first * width);
        }
    }
#if defined(TILES)
    tiles_end();
#endif
    for (long m = 0; m < rows; m++) {
        const ACC total = _mm512_reduce_add_ps(_mm512_loadu_ps(s->totals + m * LANES_F32));
        store_row(s->out + m * width, total == 0 ? 0 : 1 / total, dim, out + m / group * out_stride + m % group * dim);
        if (lse) lse[m / group * lse_stride + m % group] = maximum[m] * 0.693147180559945309f + LOG(total);
    }
}
#undef STRIP
#undef SPACE_ROWS

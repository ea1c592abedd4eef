/* Attention of one item by VDPBF16PS (pairs of bfloat16, summed in float32), in place of attention_tile.h's products.
 *
 * A score is 16 sums, of pairs l, l + 16, l + 32, ... of the head's dimension, added as a tree: ((0+8)+(1+9)) + ((2+10)+(3+11))
 * and so on. One query against four keys has the 16 in the lanes of a register; many queries against keys that were
 * turned (pairs by keys) have them one after the other, and the same tree. So a score has the same bits in both ways, and
 * which way is taken depends on the number of queries alone.
 * Weights are rounded to bfloat16 for the sum over values, which runs over pairs of positions in ascending order.
 */
#define TURN_FROM 8 /* rows from which keys are turned */

typedef struct {
    T *q, *keys, *values, *weights; /* [MAX_QUERIES, width], [KEY_TILE, width] twice, [MAX_QUERIES, KEY_TILE] */
    T *turned;                      /* [width / 2, KEY_TILE, 2] */
    ACC *out, *scores;              /* [MAX_QUERIES, width] in the order of `unpacked`, [MAX_QUERIES, KEY_TILE] */
} NAME(Space);

static size_t NAME(space)(char *base, long width, NAME(Space) *s) {
    const size_t rows = MAX_QUERIES * (size_t)width, tile = KEY_TILE * (size_t)width, square = MAX_QUERIES * KEY_TILE;
    if (base) {
        s->out = (ACC *)base;
        s->scores = s->out + rows;
        s->q = (T *)(s->scores + square);
        s->keys = s->q + rows;
        s->values = s->keys + tile;
        s->turned = s->values + tile;
        s->weights = s->turned + tile;
    }
    return (rows + square) * sizeof(ACC) + (rows + 3 * tile + square) * sizeof(T);
}

INLINE __m512bh load_pairs(const T *p) { return (__m512bh)_mm512_loadu_si512(p); }

INLINE __m512bh one_pair(const T *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return (__m512bh)_mm512_set1_epi32(two);
}

/* scores[m][0..3] = q[m] . keys[0..3] for mr rows. */
INLINE void dot_scores(const int mr, const T *q, long width, const T *const *keys, ACC *scores) {
    __m512 acc[4][3];
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++)
#pragma GCC unroll 3
        for (int m = 0; m < mr; m++) acc[n][m] = _mm512_setzero_ps();
    for (long i = 0; i < width; i += 32)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            const __m512bh key = load_pairs(keys[n] + i);
#pragma GCC unroll 3
            for (int m = 0; m < mr; m++)
                acc[n][m] = _mm512_dpbf16_ps(acc[n][m], load_pairs(q + m * width + i), key);
        }
#pragma GCC unroll 3
    for (int m = 0; m < mr; m++)
        sum4_f32((vf32)acc[0][m], (vf32)acc[1][m], (vf32)acc[2][m], (vf32)acc[3][m], scores + m * KEY_TILE);
}

static void all_dot_scores(long rows, const T *q, long width, const T *const *keys, long count, ACC *scores) {
    for (long j = 0; j < count; j += 4) {
        long m = 0;
        for (; m + 3 <= rows; m += 3) dot_scores(3, q + m * width, width, keys + j, scores + m * KEY_TILE + j);
        if (rows - m == 2) dot_scores(2, q + m * width, width, keys + j, scores + m * KEY_TILE + j);
        if (rows - m == 1) dot_scores(1, q + m * width, width, keys + j, scores + m * KEY_TILE + j);
    }
}

/* 16 keys by 16 pairs to 16 pairs by 16 keys. */
INLINE void turn_block(const T *const *keys, long at, T *turned) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(keys[i] + at);
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

/* Sum l of a score, and sum l + 8, added: for mr rows against 32 keys. */
INLINE void turned_lane(const int mr, const T *q, long width, const T *turned, int lane, __m512 sum[4][2]) {
    __m512 acc[2][4][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
        for (int m = 0; m < mr; m++) acc[half][m][0] = acc[half][m][1] = _mm512_setzero_ps();
    for (long i = 0; i < width; i += 32)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const long pair = i / 2 + lane + 8 * half;
            const __m512bh left = load_pairs(turned + pair * 2 * KEY_TILE);
            const __m512bh right = load_pairs(turned + pair * 2 * KEY_TILE + 32);
#pragma GCC unroll 4
            for (int m = 0; m < mr; m++) {
                const __m512bh query = one_pair(q + m * width + 2 * pair);
                acc[half][m][0] = _mm512_dpbf16_ps(acc[half][m][0], query, left);
                acc[half][m][1] = _mm512_dpbf16_ps(acc[half][m][1], query, right);
            }
        }
#pragma GCC unroll 4
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) sum[m][v] = _mm512_add_ps(acc[0][m][v], acc[1][m][v]);
}

/* scores[m][0..31] for mr rows, from keys that were turned. */
INLINE void turned_scores(const int mr, const T *q, long width, const T *turned, ACC *scores) {
    __m512 whole[4][2], half[4][2], quarter[4][2], lane[4][2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
            turned_lane(mr, q, width, turned, 4 * h + 2 * p, quarter);
            turned_lane(mr, q, width, turned, 4 * h + 2 * p + 1, lane);
#pragma GCC unroll 4
            for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) {
                    const __m512 two = _mm512_add_ps(quarter[m][v], lane[m][v]);
                    half[m][v] = p ? _mm512_add_ps(half[m][v], two) : two;
                }
        }
#pragma GCC unroll 4
        for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) whole[m][v] = h ? _mm512_add_ps(whole[m][v], half[m][v]) : half[m][v];
    }
#pragma GCC unroll 4
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) _mm512_storeu_ps(scores + m * KEY_TILE + 16 * v, whole[m][v]);
}

/* All rows against a tile; `keys` has KEY_TILE pointers, those beyond `count` to some key. */
static void all_turned_scores(long rows, const T *q, long width, const T *const *keys, long count, T *turned,
                              ACC *scores) {
    const long padded = ROUND_UP(count, 32);
    for (long at = 0; at < width; at += 32)
        for (long j = 0; j < padded; j += 16) turn_block(keys + j, at, turned + at * KEY_TILE + 2 * j);
    for (long j = 0; j < padded; j += 32)
        for (long m = 0; m < rows; m += 4) {
            const T *const query = q + m * width;
            ACC *const to = scores + m * KEY_TILE + j;
            switch (rows - m) {
            case 1: turned_scores(1, query, width, turned + 2 * j, to); break;
            case 2: turned_scores(2, query, width, turned + 2 * j, to); break;
            case 3: turned_scores(3, query, width, turned + 2 * j, to); break;
            default: turned_scores(4, query, width, turned + 2 * j, to); break;
            }
        }
}

/* out[m] += weights[m] . values for mr rows and nc times 32 columns; out has a chunk's columns as unpack gives them:
 * 0-3, 8-11, 16-19, 24-27, then the others. `count` is even. */
INLINE void dot_values(const int mr, const int nc, const T *weights, const T *const *values, long count, long column,
                       ACC *out, long width) {
    __m512 low[6][2], high[6][2];
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++) {
            low[m][c] = _mm512_loadu_ps(out + m * width + column + 32 * c);
            high[m][c] = _mm512_loadu_ps(out + m * width + column + 32 * c + 16);
        }
    for (long j = 0; j < count; j += 2) {
        __m512bh below[2], above[2];
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++) {
            const __m512i first = _mm512_loadu_si512(values[j] + column + 32 * c);
            const __m512i second = _mm512_loadu_si512(values[j + 1] + column + 32 * c);
            below[c] = (__m512bh)_mm512_unpacklo_epi16(first, second);
            above[c] = (__m512bh)_mm512_unpackhi_epi16(first, second);
        }
#pragma GCC unroll 6
        for (int m = 0; m < mr; m++) {
            const __m512bh weight = one_pair(weights + m * KEY_TILE + j);
#pragma GCC unroll 2
            for (int c = 0; c < nc; c++) {
                low[m][c] = _mm512_dpbf16_ps(low[m][c], weight, below[c]);
                high[m][c] = _mm512_dpbf16_ps(high[m][c], weight, above[c]);
            }
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
        for (int c = 0; c < nc; c++) {
            _mm512_storeu_ps(out + m * width + column + 32 * c, low[m][c]);
            _mm512_storeu_ps(out + m * width + column + 32 * c + 16, high[m][c]);
        }
}

INLINE void dot_values_row(const int mr, const T *weights, const T *const *values, long count, ACC *out, long width) {
    long column = 0;
    for (; column + 64 <= width; column += 64) dot_values(mr, 2, weights, values, count, column, out, width);
    if (column < width) dot_values(mr, 1, weights, values, count, column, out, width);
}

static void all_dot_values(long rows, const T *weights, const T *const *values, long count, long width, ACC *out) {
    for (long m = 0; m < rows; m += 6, weights += 6 * KEY_TILE, out += 6 * width)
        switch (rows - m) {
        case 1: dot_values_row(1, weights, values, count, out, width); break;
        case 2: dot_values_row(2, weights, values, count, out, width); break;
        case 3: dot_values_row(3, weights, values, count, out, width); break;
        case 4: dot_values_row(4, weights, values, count, out, width); break;
        case 5: dot_values_row(5, weights, values, count, out, width); break;
        default: dot_values_row(6, weights, values, count, out, width); break;
        }
}

/* Sums in the order of dot_values, times `factor`, to `dim` numbers in their own. */
static void unpacked(const ACC *sums, ACC factor, long dim, long width, T *out) {
    for (long i = 0; i < width; i += 32) {
        const vu32 low = round_bits_vf32(*(const vf32_mem *)(sums + i) * factor) >> 16;
        const vu32 high = round_bits_vf32(*(const vf32_mem *)(sums + i + 16) * factor) >> 16;
        const __m512i both = _mm512_packus_epi32((__m512i)low, (__m512i)high);
        const __mmask32 there = dim - i >= 32 ? 0xffffffffu : (1u << (dim - i)) - 1;
        _mm512_mask_storeu_epi16(out + i, there, both);
    }
}

/* As the `attend` of attention.h. */
static void NAME(attend)(const NAME(Cache) *c, const int32_t *table, long kv_head, long num_visible, int grows,
                         long num_tokens, long group, const T *q, long q_stride, T *out, long out_stride, ACC *lse,
                         long lse_stride, ACC scale, NAME(Space) *s) {
    const long dim = c->head_dim, width = ROUND_UP(dim, 32), rows = num_tokens * group;
    ACC maximum[MAX_QUERIES], total[MAX_QUERIES];
    for (long m = 0; m < rows; m++) {
        memset(s->q + m * width, 0, (size_t)width * sizeof(T));
        memcpy(s->q + m * width, q + m / group * q_stride + m % group * dim, (size_t)dim * sizeof(T));
        maximum[m] = -INFINITY;
        total[m] = 0;
    }
    memset(s->out, 0, (size_t)(rows * width) * sizeof(ACC));
    if (width != dim) memset(s->keys, 0, (size_t)(2 * KEY_TILE * width) * sizeof(T)); /* values too */
    const long num_keys = num_visible + (grows ? num_tokens - 1 : 0), value_offset = c->kv_heads * c->block_size * dim;
    for (long tile = 0; tile < num_keys; tile += KEY_TILE) {
        const long count = num_keys - tile < KEY_TILE ? num_keys - tile : KEY_TILE;
        const T *keys[KEY_TILE], *values[KEY_TILE];
        NAME(ask_for_tile)(c, table, kv_head, tile + KEY_TILE, num_keys);
        NAME(locate)(c, table, kv_head, tile, count, keys);
        for (long j = 0; j < count; j++) {
            values[j] = keys[j] + value_offset;
            if (width != dim) {
                keys[j] = memcpy(s->keys + j * width, keys[j], (size_t)dim * sizeof(T));
                values[j] = memcpy(s->values + j * width, values[j], (size_t)dim * sizeof(T));
            }
        }
        for (long j = count; j < KEY_TILE; j++) {
            keys[j] = keys[count - 1];
            values[j] = values[count - 1];
        }
        if (rows >= TURN_FROM)
            all_turned_scores(rows, s->q, width, keys, count, s->turned, s->scores);
        else
            all_dot_scores(rows, s->q, width, keys, count, s->scores);
        const long padded = ROUND_UP(count, 16);
        for (long m = 0; m < rows; m++) {
            ACC *const scores = s->scores + m * KEY_TILE;
            long valid = num_visible + (grows ? m / group : 0) - tile;
            valid = valid < 0 ? 0 : valid > count ? count : valid;
            NAME(online_softmax)(scores, valid, padded, scale, maximum + m, total + m, s->out + m * width, width);
            for (long j = 0; j < padded; j++) s->weights[m * KEY_TILE + j] = f32_to_bf16(scores[j]);
        }
        all_dot_values(rows, s->weights, values, ROUND_UP(count, 2), width, s->out);
    }
    for (long m = 0; m < rows; m++)
        unpacked(s->out + m * width, 1 / total[m], dim, width, out + m / group * out_stride + m % group * dim);
    for (long m = 0; lse && m < rows; m++) lse[m / group * lse_stride + m % group] = maximum[m] + LOG(total[m]);
}
#undef TURN_FROM

/* Paged causal attention and the write of new keys and values, for one dtype. See kernels.c for the macros.
 *
 * One item of work is a KV head's query heads for a few consecutive tokens of one row; keys and values stream by
 * in tiles of KEY_TILE positions, aligned to absolute position 0, with a running softmax (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"). Each number is produced by the same operations in
 * the same order however many tokens, heads or rows are processed together: a token's result depends neither on
 * the batch nor on how its prompt was chunked. Masked scores have weight exactly 0 and change nothing: so tiles that are
 * hidden from all tokens of an item (by a sliding window, from below) are left out, and no bit says so.
 */
#define KEY_TILE 64
#define CALLED __attribute__((noinline)) /* or GCC makes several of the loop around it, all of them slower */
#if defined(BF16_DOT)
#define MAX_QUERIES 96 /* rows (token x head) of one item */
#else
#define MAX_QUERIES 48
#endif

/* One layer's arena. */
typedef struct {
    const T *arena;
    long kv_heads, block_size, head_dim;
} NAME(Cache);

/* Where the keys of positions [first, first + count) of one row lie. */
INLINE void NAME(locate)(const NAME(Cache) *c, const int32_t *table, long kv_head, long first, long count,
                         const T **keys) {
    const long head = c->block_size * c->head_dim;
    long j = 0, block = first / c->block_size, offset = first % c->block_size;
    for (; j < count; block++, offset = 0) {
        const T *key = c->arena + (table[block] * 2 * c->kv_heads + kv_head) * head + offset * c->head_dim;
        for (; offset < c->block_size && j < count; offset++, j++, key += c->head_dim) keys[j] = key;
    }
}

/* The keys from `first` to before `end` of a row and KV head. */
typedef struct {
    const int32_t *table;
    long kv_head, first, end;
} NAME(Keys);

/* What consecutive tokens of a row see of its keys: the first one those from `first` (which may be below 0) to before
 * `end`. Each next one loses the first of them, and sees one more where `grows`. */
typedef struct {
    long first, end;
    int grows;
} NAME(Sight);

#define FROM_THE_START (LONG_MIN / 2) /* `first` without a window, for any number of tokens */

/* The keys that one of `num_tokens` such tokens sees, or more. */
INLINE NAME(Keys) NAME(keys_of)(const NAME(Sight) *seen, const int32_t *table, long kv_head, long num_tokens) {
    const NAME(Keys) keys = {table, kv_head, seen->first > 0 ? seen->first : 0,
                             seen->end + (seen->grows ? num_tokens - 1 : 0)};
    return keys;
}

/* Where the first tile of keys begins; at or beyond `end` if there are none. */
INLINE long NAME(first_tile)(const NAME(Keys) *k) {
    return k->first < k->end ? k->first - k->first % KEY_TILE : k->end;
}

/* The options of attention that each tile needs. */
typedef struct {
    ACC scale, softcap; /* of scores: scale them, then softcap * tanh(score / softcap); 0 for no cap */
} NAME(Scores);

/* Where there is a cap, scale and cap all scores of a tile, some of which are none: by whole vectors, all are computed
 * alike. */
static CALLED void NAME(cap_scores)(ACC *scores, long num_scores, const NAME(Scores) *how) {
    if (!(how->softcap > 0)) return;
    const ACC softcap = how->softcap, scale = how->scale / softcap;
    for (long j = 0; j < num_scores; j++) scores[j] = softcap * TANH(scores[j] * scale);
}

#if defined(BF16_DOT)
#include "attention_dot.h"
#else
/* The keys of a tile, and their values, are needed soon. Blocks lie anywhere: the processor sees no stream in them, and
 * each of its own misses would be waited for. */
static void NAME(ask_for_tile)(const NAME(Cache) *c, const NAME(Keys) *k, long tile) {
    const long head = c->block_size * c->head_dim, value_offset = c->kv_heads * head;
    const long end = k->end - tile < KEY_TILE ? k->end : tile + KEY_TILE;
    for (long at = tile < k->first ? k->first : tile; at < end;) {
        const long block = k->table[at / c->block_size], offset = at % c->block_size, left = c->block_size - offset;
        const long count = end - at < left ? end - at : left;
        const T *const keys = c->arena + (block * 2 * c->kv_heads + k->kv_head) * head + offset * c->head_dim;
        for (long i = 0; i < count * c->head_dim; i += 64 / (long)sizeof(T)) {
            __builtin_prefetch(keys + i, 0, 3);
            __builtin_prefetch(keys + value_offset + i, 0, 3);
        }
        at += count;
    }
}

/* The part of a tile of `count` keys that token `i` sees: from `hidden` to before `valid`. */
INLINE void NAME(see)(const NAME(Sight) *seen, long i, long tile, long count, long *hidden, long *valid) {
    const long from = seen->first + i - tile, to = seen->end + (seen->grows ? i : 0) - tile;
    *hidden = from < 0 ? 0 : from > count ? count : from;
    *valid = to < 0 ? 0 : to > count ? count : to;
}

/* Turn one row's scores of a tile into weights relative to the running maximum and rescale what was summed so far. The
 * row sees the keys from `hidden` to before `valid`. */
static CALLED void NAME(online_softmax)(ACC *restrict scores, long hidden, long valid, long padded, ACC scale,
                                        ACC *restrict maximum, ACC *restrict total, ACC *restrict out, long width) {
    ACC tile_max = -INFINITY;
    for (long j = 0; j < hidden; j++) scores[j] = -INFINITY;
#pragma omp simd reduction(max : tile_max)
    for (long j = 0; j < valid; j++) {
        scores[j] *= scale;
        tile_max = scores[j] > tile_max ? scores[j] : tile_max;
    }
    for (long j = valid; j < padded; j++) scores[j] = -INFINITY;
    if (valid <= hidden) {
        for (long j = 0; j < padded; j++) scores[j] = 0;
        return;
    }
    const ACC new_max = tile_max > *maximum ? tile_max : *maximum;
    for (long j = 0; j < padded; j++) scores[j] = EXP(scores[j] - new_max);
    /* Lanes of a fixed number keep the order of the sum independent of `padded`. */
    ACC lanes[16] = {0}, sum = 0;
    for (long j = 0; j < padded; j += 16)
        for (int l = 0; l < 16; l++) lanes[l] += scores[j + l];
    for (int l = 0; l < 16; l++) sum += lanes[l];
    if (*maximum != new_max) {
        const ACC shrink = EXP(*maximum - new_max); /* 0 on the first tile: EXP(-inf) */
        *total *= shrink;
        for (long i = 0; i < width; i++) out[i] *= shrink;
        *maximum = new_max;
    }
    *total += sum;
}

#define FORM(name) NAME(GLUE(name, _stored))
#define KV T
#define LOAD_KV LOAD_T
#include "attention_tile.h"
#undef FORM
#undef KV
#undef LOAD_KV

/* Packed into scratch as sums are: narrow keys that serve many rows, and heads that are no whole number of chunks. */
#if STORAGE_IS_NARROW
#define FORM(name) NAME(GLUE(name, _packed))
#define KV ACC
#define LOAD_KV LOAD_A
#include "attention_tile.h"
#undef FORM
#undef KV
#undef LOAD_KV
#define ALL_SCORES_PACKED NAME(all_scores_packed)
#define ALL_VALUES_PACKED NAME(all_values_packed)
#else
#define ALL_SCORES_PACKED NAME(all_scores_stored)
#define ALL_VALUES_PACKED NAME(all_values_stored)
#endif

/* Sums to stored numbers, times `factor`. */
static void NAME(narrow_scaled)(const ACC *x, ACC factor, long n, T *out) {
    VACC lo, hi;
    long i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        LOAD_A(x + i, &lo, &hi);
        STORE_T(out + i, lo * factor, hi * factor);
    }
    if (i < n) {
        T rest[CHUNK];
        LOAD_A(x + i, &lo, &hi);
        STORE_T(rest, lo * factor, hi * factor);
        memcpy(out + i, rest, (size_t)(n - i) * sizeof(T));
    }
}

/* Working space of one item. */
typedef struct {
    ACC *q, *out, *scores, *keys, *values;
} NAME(Space);

static size_t NAME(space)(char *base, long width, NAME(Space) *s) {
    size_t q = (size_t)(MAX_QUERIES * width) * sizeof(ACC), tile = (size_t)(KEY_TILE * width) * sizeof(ACC);
    if (base) {
        s->q = (ACC *)base;
        s->out = (ACC *)(base + q);
        s->keys = (ACC *)(base + 2 * q);
        s->values = (ACC *)(base + 2 * q + tile);
        s->scores = (ACC *)(base + 2 * q + 2 * tile);
    }
    return 2 * q + 2 * tile + MAX_QUERIES * KEY_TILE * sizeof(ACC);
}

/* Tokens of one row, which see `seen`: q and out point at the first of them, at the KV head's first query head. `next`
 * is asked for at the end. `lse`, if not NULL, gets the log of each row's sum of exponentials, so that parts over disjoint
 * keys can be merged; a row that sees none has -inf, and zeros in `out`. */
static void NAME(attend)(const NAME(Cache) *c, const int32_t *table, long kv_head, const NAME(Sight) *seen,
                         long num_tokens, long group, const T *q, long q_stride, T *out, long out_stride, ACC *lse,
                         long lse_stride, const NAME(Scores) *how, const NAME(Keys) *next, NAME(Space) *s) {
    const long dim = c->head_dim, width = ROUND_UP(dim, CHUNK), rows = num_tokens * group;
    const ACC scale = how->softcap > 0 ? 1 : how->scale;
    const int pack = width != dim || (STORAGE_IS_NARROW && rows >= PACK_FROM);
    ACC maximum[MAX_QUERIES], total[MAX_QUERIES];
    for (long m = 0; m < rows; m++) {
        NAME(widen)(q + m / group * q_stride + m % group * dim, dim, s->q + m * width);
        maximum[m] = -INFINITY;
        total[m] = 0;
    }
    memset(s->out, 0, (size_t)(rows * width) * sizeof(ACC));
    const NAME(Keys) all = NAME(keys_of)(seen, table, kv_head, num_tokens);
    const long value_offset = c->kv_heads * c->block_size * dim;
    for (long tile = NAME(first_tile)(&all); tile < all.end; tile += KEY_TILE) {
        const long count = all.end - tile < KEY_TILE ? all.end - tile : KEY_TILE;
        const long skipped = all.first > tile ? all.first - tile : 0;
        const T *keys[KEY_TILE], *values[KEY_TILE];
        if (tile + KEY_TILE < all.end) NAME(ask_for_tile)(c, &all, tile + KEY_TILE);
        else NAME(ask_for_tile)(c, next, NAME(first_tile)(next));
        NAME(locate)(c, table, kv_head, tile + skipped, count - skipped, keys + skipped);
        for (long j = 0; j < skipped; j++) keys[j] = keys[skipped];
        for (long j = 0; j < count; j++) values[j] = keys[j] + value_offset;
        const ACC *packed_keys[KEY_TILE], *packed_values[KEY_TILE];
        for (long j = 0; pack && j < count; j++) {
            NAME(widen)(keys[j], dim, s->keys + j * width);
            NAME(widen)(values[j], dim, s->values + j * width);
            packed_keys[j] = s->keys + j * width;
            packed_values[j] = s->values + j * width;
        }
        for (long j = count; j < ROUND_UP(count, 4); j++) {
            keys[j] = keys[count - 1];
            packed_keys[j] = s->keys;
        }
        if (pack)
            ALL_SCORES_PACKED(rows, s->q, width, packed_keys, count, s->scores);
        else
            NAME(all_scores_stored)(rows, s->q, width, keys, count, s->scores);
        NAME(cap_scores)(s->scores, rows * KEY_TILE, how);
        for (long m = 0; m < rows; m++) {
            long hidden, valid;
            NAME(see)(seen, m / group, tile, count, &hidden, &valid);
            NAME(online_softmax)(s->scores + m * KEY_TILE, hidden, valid, ROUND_UP(count, 16), scale, maximum + m,
                                 total + m, s->out + m * width, width);
        }
        if (pack)
            ALL_VALUES_PACKED(rows, s->scores, packed_values, count, width, s->out);
        else
            NAME(all_values_stored)(rows, s->scores, values, count, width, s->out);
    }
    for (long m = 0; m < rows; m++)
        NAME(narrow_scaled)(s->out + m * width, total[m] == 0 ? 0 : 1 / total[m], dim,
                            out + m / group * out_stride + m % group * dim);
    for (long m = 0; lse && m < rows; m++) lse[m / group * lse_stride + m % group] = maximum[m] + LOG(total[m]);
}
#endif

typedef struct {
    NAME(Cache) cache;
    const T *q;
    T *out;
    ACC *lse;
    const int32_t *tables, *query_lens, *context_lens, *first_positions; /* the last: NULL for the context's ends */
    long q_stride, out_stride, num_heads, table_stride, num_rows, step;  /* step: most tokens of an item */
    NAME(Scores) how;
    long window; /* 0 for none */
    int only_context, error;
} NAME(Attention);

/* An item of work: tokens from `token` on of a row, which begins at `start` of all tokens, and a KV head. */
typedef struct {
    long item, row, token, head, start;
} NAME(Place);

/* Go on to an item; items are numbered by row, tokens, and head. */
static void NAME(walk)(const NAME(Attention) *a, NAME(Place) *p, long item) {
    const long kv_heads = a->cache.kv_heads;
    for (;;) {
        const long num_items = (a->query_lens[p->row] + a->step - 1) / a->step * kv_heads;
        if (item - p->item < num_items) break;
        p->item += num_items;
        p->start += a->query_lens[p->row++];
    }
    p->token = (item - p->item) / kv_heads * a->step;
    p->head = (item - p->item) % kv_heads;
}

/* Keys that the tokens of an item see. */
INLINE NAME(Sight) NAME(sight)(const NAME(Attention) *a, const NAME(Place) *p) {
    const long context = a->context_lens[p->row];
    const long position = (a->first_positions ? a->first_positions[p->row] : context) + p->token;
    const NAME(Sight) seen = {a->window > 0 ? position + 1 - a->window : FROM_THE_START,
                              context + (a->only_context ? 0 : p->token + 1), !a->only_context};
    return seen;
}

/* A thread draws an item while it has one, so that memory is asked for what it begins with. */
static void NAME(attention_body)(void *arguments, Draw *draw) {
    NAME(Attention) *const a = arguments;
    const long dim = a->cache.head_dim, kv_heads = a->cache.kv_heads, group = a->num_heads / kv_heads;
    const long width = ROUND_UP(dim, CHUNK);
    NAME(Space) space;
    char *base = scratch(NAME(space)(NULL, width, NULL));
    if (base) NAME(space)(base, width, &space);
    else __atomic_store_n(&a->error, ERROR_MEMORY, __ATOMIC_RELAXED);
    NAME(Place) next = {0};
    long mine = jettison_pool_next(draw);
    if (mine >= 0) NAME(walk)(a, &next, mine);
    while (mine >= 0) {
        const NAME(Place) p = next;
        if ((mine = jettison_pool_next(draw)) >= 0) NAME(walk)(a, &next, mine);
        const NAME(Sight) seen = NAME(sight)(a, &p), then = NAME(sight)(a, &next);
        const NAME(Keys) soon = NAME(keys_of)(&then, a->tables + next.row * a->table_stride, next.head, 1);
        const long left = a->query_lens[p.row] - p.token, n = left < a->step ? left : a->step;
        const long first = p.start + p.token;
        for (long g = 0; base && g < group; g += MAX_QUERIES) {
            const long heads = group - g < MAX_QUERIES ? group - g : MAX_QUERIES;
            const long column = (p.head * group + g) * dim;
            ACC *const lse = a->lse ? a->lse + first * a->num_heads + p.head * group + g : NULL;
            NAME(attend)(&a->cache, a->tables + p.row * a->table_stride, p.head, &seen, n, heads,
                         a->q + first * a->q_stride + column, a->q_stride, a->out + first * a->out_stride + column,
                         a->out_stride, lse, a->num_heads, &a->how, &soon, &space);
        }
    }
}

static int NAME(attention)(const T *q, long q_stride, const T *arena, long num_kv_heads, long block_size, long head_dim,
                          long num_heads, const int32_t *tables, long table_stride, const int32_t *query_lens,
                          const int32_t *context_lens, long num_rows, T *out, long out_stride, ACC *lse,
                          int only_context, const int32_t *first_positions, long window, double softcap, double scale,
                          int num_threads) {
    const long group = num_heads / num_kv_heads, step = group > MAX_QUERIES ? 1 : MAX_QUERIES / group;
    NAME(Attention) all = {{arena, num_kv_heads, block_size, head_dim}, q, out, lse, tables, query_lens, context_lens,
                           first_positions, q_stride, out_stride, num_heads, table_stride, num_rows, step,
                           {(ACC)scale, (ACC)softcap}, window, only_context, 0};
    long num_items = 0;
    for (long r = 0; r < num_rows; r++) num_items += (query_lens[r] + step - 1) / step * num_kv_heads;
    jettison_pool_run(num_threads, num_items, NAME(attention_body), &all);
    return all.error;
}

static void NAME(write_kv)(const T *k, long k_stride, const T *v, long v_stride, T *arena, long num_kv_heads,
                           long block_size, long head_dim, const int32_t *tables, long table_stride,
                           const int32_t *query_lens, const int32_t *context_lens, long num_rows) {
    const long plane = num_kv_heads * block_size * head_dim;
    for (long r = 0; r < num_rows; r++) {
        for (long i = 0; i < query_lens[r]; i++, k += k_stride, v += v_stride) {
            const long position = context_lens[r] + i;
            const long block = tables[r * table_stride + position / block_size];
            T *to = arena + block * 2 * plane + position % block_size * head_dim;
            for (long h = 0; h < num_kv_heads; h++, to += block_size * head_dim) {
                memcpy(to, k + h * head_dim, (size_t)head_dim * sizeof(T));
                memcpy(to + plane, v + h * head_dim, (size_t)head_dim * sizeof(T));
            }
        }
    }
}
#undef ALL_SCORES_PACKED
#undef ALL_VALUES_PACKED
#undef KEY_TILE
#undef CALLED
#undef FROM_THE_START
#undef MAX_QUERIES

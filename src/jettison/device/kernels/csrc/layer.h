/* The two halves of a decoder layer, for one dtype: all that happens between one call of Python and the next.
 * The operations are those of the other files, in the same order with the same roundings; small ones are taken together,
 * row by row, and shared by all threads as the products are. */

#define ROWS_AN_ITEM(columns) (16384 / (columns) + 1)

typedef struct {
    const T *x, *weight;
    T *residual, *out;
    double eps;
    long x_stride, residual_stride, out_stride, rows, n, step; /* step: rows of an item, as in all of these */
} NAME(NormWork);

static void NAME(norm_body)(void *arguments, Draw *draw) {
    const NAME(NormWork) *const w = arguments;
    for (long item; (item = jettison_pool_next(draw)) >= 0;) {
        const long first = item * w->step, rows = w->rows - first < w->step ? w->rows - first : w->step;
        NAME(add_rms_norm)(w->x + first * w->x_stride, w->x_stride, w->residual + first * w->residual_stride,
                           w->residual_stride, w->weight, w->eps, w->out + first * w->out_stride, w->out_stride, rows,
                           w->n);
    }
}

static void NAME(add_norm_rows)(const T *x, long x_stride, T *residual, long residual_stride, const T *weight,
                                double eps, T *out, long out_stride, long rows, long n, int threads) {
    NAME(NormWork) norm = {x, weight, residual, out, eps, x_stride, residual_stride, out_stride, rows, n,
                           ROWS_AN_ITEM(n)};
    jettison_pool_run(threads, (rows + norm.step - 1) / norm.step, NAME(norm_body), &norm);
}

typedef struct {
    const T *gate_up;
    T *out;
    long rows, n, step;
} NAME(GateWork);

static void NAME(gate_body)(void *arguments, Draw *draw) {
    const NAME(GateWork) *const w = arguments;
    for (long item; (item = jettison_pool_next(draw)) >= 0;) {
        const long first = item * w->step, rows = w->rows - first < w->step ? w->rows - first : w->step;
        NAME(silu_mul)(w->gate_up + first * 2 * w->n, 2 * w->n, w->out + first * w->n, w->n, rows, w->n);
    }
}

typedef struct {
    const LayerShape *shape;
    const LayerConstants *constants;
    const T *q_norm, *k_norm;
    T *qkv, *arena;
    const BatchRows *batch;
    long step;
} NAME(CacheWork);

/* Norms of heads, rotation, and the new keys and values into their blocks. */
static void NAME(cache_body)(void *arguments, Draw *draw) {
    const NAME(CacheWork) *const w = arguments;
    const LayerShape *const s = w->shape;
    const LayerConstants *const c = w->constants;
    const BatchRows *const b = w->batch;
    const long dim = s->head_dim, q_size = s->num_heads * dim, kv_size = s->num_kv_heads * dim;
    const long stride = q_size + 2 * kv_size;
    for (long item; (item = jettison_pool_next(draw)) >= 0;) {
        const long first = item * w->step, end = b->num_tokens - first < w->step ? b->num_tokens : first + w->step;
        T *const q = w->qkv + first * stride, *const k = q + q_size;
        if (w->q_norm) NAME(head_rms_norm)(q, stride, w->q_norm, c->eps, end - first, s->num_heads, dim, c->norm);
        if (w->k_norm) NAME(head_rms_norm)(k, stride, w->k_norm, c->eps, end - first, s->num_kv_heads, dim, c->norm);
        NAME(rotary)(q, stride, s->num_heads, k, stride, s->num_kv_heads, c->cos, c->sin, b->positions + first, 0,
                     end - first, dim, c->rotary_dim);
        long start = 0; /* of the row, in tokens */
        for (long r = 0; r < b->num_rows && start < end; start += b->query_lens[r++]) {
            const long from = start > first ? start : first, row_end = start + b->query_lens[r];
            const int32_t count = (int32_t)((row_end < end ? row_end : end) - from);
            const int32_t context = b->context_lens[r] + (int32_t)(from - start);
            const T *const key = w->qkv + from * stride + q_size;
            if (count > 0)
                NAME(write_kv)(key, stride, key + kv_size, stride, w->arena, s->num_kv_heads, s->block_size, dim,
                               b->tables + r * b->table_stride, b->table_stride, &count, &context, 1);
        }
    }
}

static int NAME(multiply)(const T *x, long x_stride, const Matrix *w, T *out, long rows, long n, long k, int threads) {
#if IS_PACKED
    const Form *const form = form_of(&w->form);
    if (form || w->is_packed)
        return NAME(linear_slab)(form, x, x_stride, w->data, w->bias, (Out){out, n, 0}, rows, n, k, threads);
#endif
    return NAME(linear)(x, x_stride, w->data, k, w->bias, (Out){out, n, 0}, rows, n, k, threads);
}

static int NAME(attend_layer)(const LayerShape *s, const LayerWeights *w, const LayerConstants *c, const BatchRows *b,
                              int threads) {
    const long dim = s->head_dim, q_size = s->num_heads * dim, stride = q_size + 2 * s->num_kv_heads * dim;
    int error = NAME(multiply)(s->x, s->hidden, &w->qkv, s->qkv, b->num_tokens, stride, s->hidden, threads);
    if (error) return error;
    NAME(CacheWork) work = {s, c, w->q_norm, w->k_norm, s->qkv, w->arena, b, ROWS_AN_ITEM(stride)};
    jettison_pool_run(threads, (b->num_tokens + work.step - 1) / work.step, NAME(cache_body), &work);
    error = NAME(attention)(s->qkv, stride, w->arena, s->num_kv_heads, s->block_size, dim, s->num_heads, b->tables,
                            b->table_stride, b->query_lens, b->context_lens, b->num_rows, s->attention, q_size, NULL, 0,
                            NULL, c->window, c->softcap, c->scale, threads);
    if (error) return error;
    return NAME(multiply)(s->attention, q_size, &w->o, s->x, b->num_tokens, s->hidden, q_size, threads);
}

static int NAME(feed_forward)(const LayerShape *s, const LayerWeights *w, double eps, long rows, int threads) {
    const long hidden = s->hidden;
    NAME(add_norm_rows)(s->x, hidden, s->residual, hidden, w->post_norm, eps, s->x, hidden, rows, hidden, threads);
    const int error = NAME(multiply)(s->x, s->hidden, &w->gate_up, s->gate_up, rows, 2 * s->inner, s->hidden, threads);
    if (error) return error;
    NAME(GateWork) gate = {s->gate_up, s->activated, rows, s->inner, ROWS_AN_ITEM(s->inner)};
    jettison_pool_run(threads, (rows + gate.step - 1) / gate.step, NAME(gate_body), &gate);
    return NAME(multiply)(s->activated, s->inner, &w->down, s->x, rows, s->hidden, s->inner, threads);
}

/* The lowest index of the largest of n numbers, or -1 where one of them is not finite. */
static long NAME(argmax_row)(const T *x, long n) {
    ACC largest = -INFINITY, check = 0;
#pragma omp simd reduction(max : largest) reduction(+ : check)
    for (long i = 0; i < n; i++) {
        const ACC value = TO_ACC(x[i]);
        largest = value > largest ? value : largest;
        check += value * 0;
    }
    if (check != 0) return -1; /* not a number: 0 times infinity, or a NaN */
    for (long i = 0; i < n; i++)
        if (TO_ACC(x[i]) == largest) return i;
    return -1;
}

typedef struct {
    const T *logits;
    int64_t *tokens;
    long stride, n;
} NAME(ArgmaxWork);

static void NAME(argmax_body)(void *arguments, Draw *draw) {
    const NAME(ArgmaxWork) *const w = arguments;
    for (long row; (row = jettison_pool_next(draw)) >= 0;)
        w->tokens[row] = NAME(argmax_row)(w->logits + row * w->stride, w->n);
}
#undef ROWS_AN_ITEM

/* A layer's experts, with packed weights or integers: see Kernels.experts. Part of packed.h.
 *
 * Pairs of a token and an expert are sorted by expert, and by token within one. A product is a list of jobs: an expert,
 * some of its pairs, and an item of each is some groups of outputs. An output is the chain of sums of packed.h, and a
 * token's sum over its experts is in the order of its choice, so that no bit depends on other tokens.
 */
#define ALONE_BELOW (1L << 18) /* activations: a tenth of a millisecond or two */

typedef struct {
    int32_t expert, first, rows; /* pairs [first, first + rows) */
} NAME(ExpertJob);

typedef struct {
    const T *x;
    const char *w;    /* of all experts */
    const T *bias;    /* NULL, or [experts, n] */
    const Form *form; /* NULL: [experts, n, k], packed */
    T *out;                /* [pairs, n] */
    const int32_t *row_of; /* of x for each pair; NULL: the pair's own */
    const NAME(ExpertJob) *jobs;
    long num_jobs, n, k, num_chunks, block_rows;
    int error;
} NAME(ExpertProduct);

static void NAME(expert_body)(void *arguments, Draw *draw) {
    NAME(ExpertProduct) *const p = arguments;
    const long num_groups = p->n / GROUP;
    const long expert_bytes = p->form ? num_groups * outputs_bytes(p->form, p->k) : p->n * p->k * (long)sizeof(T);
    const Out out = {p->out, p->n, 0};
    const NAME(ProductSpace) space = NAME(take_space)(p->form, p->block_rows, p->k, 0);
    long prepared_job = -1;
    if (!space.sums) __atomic_store_n(&p->error, ERROR_MEMORY, __ATOMIC_RELAXED);
    PACKED_BEGIN();
    for (long item; (item = jettison_pool_next(draw)) >= 0;) {
        if (!space.sums) continue;
        const NAME(ExpertJob) *const job = p->jobs + item / p->num_chunks;
        const long chunk = item % p->num_chunks, first = job->first;
        const int in_place = job->rows == 1 && NAME(reads_x_in_place)(p->k, 1);
        const int32_t *const row_of = p->row_of ? p->row_of + first : NULL;
        const T *const x = p->row_of ? p->x : p->x + first * p->k;
        if (prepared_job != item / p->num_chunks) {
            NAME(prepare_rows)(&space, p->form, x, p->k, row_of, job->rows, p->k, in_place);
            prepared_job = item / p->num_chunks;
        }
        const NAME(PackedX) *const from =
            in_place ? (const NAME(PackedX) *)(x + (row_of ? *row_of : 0) * p->k) : space.staged;
        const T *const bias = p->bias ? p->bias + job->expert * p->n : NULL;
        const long end = (chunk + 1) * num_groups / p->num_chunks;
        for (long group = chunk * num_groups / p->num_chunks; group < end; group++)
            NAME(slab_group)(p->form, from, p->k + 32, p->w + job->expert * expert_bytes, group, bias, out, first,
                             job->rows, p->k, &space);
    }
    PACKED_END();
}

/* One product of every pair with its expert's matrix. `jobs` has room for all of them. */
static int NAME(expert_product)(NAME(ExpertProduct) *p, NAME(ExpertJob) *jobs, const int32_t *starts, long num_experts,
                                int num_threads) {
    const long most_rows = NAME(packed_block_rows)(p->k);
    p->jobs = jobs;
    p->num_jobs = p->block_rows = 0;
    for (long expert = 0; expert < num_experts; expert++)
        for (long first = starts[expert]; first < starts[expert + 1]; first += most_rows) {
            const long left = starts[expert + 1] - first, rows = left < most_rows ? left : most_rows;
            jobs[p->num_jobs++] = (NAME(ExpertJob)){(int32_t)expert, (int32_t)first, (int32_t)rows};
            p->block_rows = ROUND_UP(rows, PACKED_ROWS) > p->block_rows ? ROUND_UP(rows, PACKED_ROWS) : p->block_rows;
        }
    const long wanted = (num_threads * PACKED_CHUNKS + p->num_jobs - 1) / p->num_jobs, groups = p->n / GROUP;
    p->num_chunks = wanted < groups ? wanted : groups;
    p->error = 0;
    jettison_pool_run(num_threads, p->num_jobs * p->num_chunks, NAME(expert_body), p);
    return p->error;
}

/* gpt-oss: neighbours are a gate and its up projection, both clamped. */
static void NAME(swiglu_clamped)(const T *gate_up, T *out, long n) {
    for (long i = 0; i < n; i++) {
        ACC gate = TO_ACC(gate_up[2 * i]), up = TO_ACC(gate_up[2 * i + 1]);
        gate = gate > 7 ? 7 : gate;
        up = up > 7 ? 7 : up < -7 ? -7 : up;
        out[i] = FROM_ACC((up + 1) * gate / (1 + EXP(gate * (ACC)-1.702)));
    }
}

typedef struct {
    const ExpertShape *shape;
    const int32_t *place_of;
    long step;
} NAME(ExpertRows);

static void NAME(expert_gate_body)(void *arguments, Draw *draw) {
    const NAME(ExpertRows) *const w = arguments;
    const ExpertShape *const s = w->shape;
    const long pairs = s->num_tokens * s->num_chosen;
    for (long item; (item = jettison_pool_next(draw)) >= 0;)
        for (long i = item * w->step; i < pairs && i < (item + 1) * w->step; i++) {
            const T *const from = (const T *)s->gate_up + i * 2 * s->inner;
            T *const to = (T *)s->activated + i * s->inner;
            if (s->is_clamped) NAME(swiglu_clamped)(from, to, s->inner);
            else NAME(silu_mul)(from, 2 * s->inner, to, s->inner, 1, s->inner);
        }
}

/* What a token's experts made, in the order of its choice. */
static void NAME(expert_sum_body)(void *arguments, Draw *draw) {
    const NAME(ExpertRows) *const w = arguments;
    const ExpertShape *const s = w->shape;
    const ACC *const shares = s->shares;
    for (long item; (item = jettison_pool_next(draw)) >= 0;)
        for (long token = item * w->step; token < s->num_tokens && token < (item + 1) * w->step; token++) {
            T *restrict const to = (T *)s->out + token * s->hidden;
            for (long from = 0; from < s->hidden; from += GROUP) {
                ACC sum[GROUP] = {0};
                for (long j = token * s->num_chosen; j < (token + 1) * s->num_chosen; j++) {
                    const T *restrict const made = (const T *)s->each + w->place_of[j] * s->hidden + from;
                    for (long i = 0; i < GROUP; i++) sum[i] += shares[j] * TO_ACC(made[i]);
                }
                for (long i = 0; i < GROUP; i++) to[from + i] = FROM_ACC(sum[i]);
            }
        }
}

static int NAME(experts)(const ExpertShape *s, int num_threads) {
    const long pairs = s->num_tokens * s->num_chosen, num_experts = s->num_experts;
    int32_t *const starts = s->space, *const token_of = starts + num_experts + 1, *const place_of = token_of + pairs;
    NAME(ExpertJob) *const jobs = (NAME(ExpertJob) *)(place_of + pairs);
    memset(starts, 0, (size_t)(num_experts + 1) * sizeof *starts);
    for (long j = 0; j < pairs; j++) {
        if (s->chosen[j] < 0 || s->chosen[j] >= num_experts) return ERROR_EXPERT;
        starts[s->chosen[j] + 1]++;
    }
    for (long expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
    for (long j = 0; j < pairs; j++) { /* starts move to their ends */
        const int32_t place = starts[s->chosen[j]]++;
        token_of[place] = (int32_t)(j / s->num_chosen);
        place_of[j] = place;
    }
    for (long expert = num_experts; expert > 0; expert--) starts[expert] = starts[expert - 1];
    starts[0] = 0;
    NAME(ExpertProduct) up = {s->x, s->gate_up_weight, s->gate_up_bias, form_of(&s->gate_up_form), s->gate_up, token_of};
    up.n = 2 * s->inner;
    up.k = s->hidden;
    int error = NAME(expert_product)(&up, jobs, starts, num_experts, num_threads);
    if (error) return error;
    NAME(ExpertRows) rows = {s, place_of, 16384 / s->inner + 1};
    /* Little work is the caller's alone: a helper that has lost its core would hold it up for longer. */
    const int gate_threads = pairs * s->inner < ALONE_BELOW ? 1 : num_threads;
    jettison_pool_run(gate_threads, (pairs + rows.step - 1) / rows.step, NAME(expert_gate_body), &rows);
    NAME(ExpertProduct) down = {s->activated, s->down_weight, s->down_bias, form_of(&s->down_form), s->each, NULL};
    down.n = s->hidden;
    down.k = s->inner;
    error = NAME(expert_product)(&down, jobs, starts, num_experts, num_threads);
    if (error) return error;
    rows.step = 16384 / (s->hidden * s->num_chosen) + 1;
    const int sum_threads = pairs * s->hidden < 2 * ALONE_BELOW ? 1 : num_threads;
    jettison_pool_run(sum_threads, (s->num_tokens + rows.step - 1) / rows.step, NAME(expert_sum_body), &rows);
    return 0;
}
#undef ALONE_BELOW

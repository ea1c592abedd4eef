/* The small operations between matrix products, for one dtype. See kernels.c for the macros.
 * Plain loops over one row at a time that the compiler vectorizes; a row never sees another one. */

static ACC NAME(sum_of_squares)(const T *restrict x, long n) {
    ACC sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += TO_ACC(x[i]) * TO_ACC(x[i]);
    return sum;
}

/* By `kind` the normalized value is rounded to the stored type before its gain, or once, behind it: as the models were
 * trained to expect. */
static void NAME(normalize)(const T *x, const T *restrict weight, long n, ACC eps, long kind, T *out) {
    const ACC factor = 1 / SQRT(NAME(sum_of_squares)(x, n) / (ACC)n + eps), more = kind == NORM_PLUS_ONE;
    if (kind == NORM_ROUNDED_FIRST) {
#pragma GCC ivdep
        for (long i = 0; i < n; i++) out[i] = FROM_ACC(TO_ACC(FROM_ACC(TO_ACC(x[i]) * factor)) * TO_ACC(weight[i]));
    } else {
#pragma GCC ivdep
        for (long i = 0; i < n; i++) out[i] = FROM_ACC(TO_ACC(x[i]) * factor * (TO_ACC(weight[i]) + more));
    }
}

static void NAME(rms_norm)(const T *x, long x_stride, const T *weight, double eps, T *out, long out_stride, long rows,
                          long n, long kind) {
    for (long r = 0; r < rows; r++) NAME(normalize)(x + r * x_stride, weight, n, (ACC)eps, kind, out + r * out_stride);
}

static void NAME(add_rms_norm)(const T *x, long x_stride, T *residual, long residual_stride, const T *weight,
                              double eps, T *out, long out_stride, long rows, long n) {
    for (long r = 0; r < rows; r++) {
        const T *restrict from = x + r * x_stride;
        T *restrict sum = residual + r * residual_stride;
        for (long i = 0; i < n; i++) sum[i] = FROM_ACC(TO_ACC(sum[i]) + TO_ACC(from[i]));
        NAME(normalize)(sum, weight, n, (ACC)eps, NORM_ROUNDED_FIRST, out + r * out_stride);
    }
}

static void NAME(head_rms_norm)(T *x, long x_stride, const T *weight, double eps, long rows, long heads, long n,
                               long kind) {
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            T *head = x + r * x_stride + h * n;
            NAME(normalize)(head, weight, n, (ACC)eps, kind, head);
        }
}

static void NAME(rotate)(T *restrict head, long half, const ACC *restrict cos, const ACC *restrict sin) {
    for (long i = 0; i < half; i++) {
        const ACC left = TO_ACC(head[i]), right = TO_ACC(head[i + half]);
        head[i] = FROM_ACC(left * cos[i] - right * sin[i]);
        head[i + half] = FROM_ACC(right * cos[i + half] + left * sin[i + half]);
    }
}

static void NAME(rotary)(T *q, long q_stride, long q_heads, T *k, long k_stride, long k_heads, const ACC *cos,
                        const ACC *sin, const void *positions, int wide_positions, long rows, long head_dim,
                        long rotary_dim) {
    for (long r = 0; r < rows; r++) {
        const int64_t position = wide_positions ? ((const int64_t *)positions)[r] : ((const int32_t *)positions)[r];
        const ACC *c = cos + position * rotary_dim, *s = sin + position * rotary_dim;
        for (long h = 0; h < q_heads; h++) NAME(rotate)(q + r * q_stride + h * head_dim, rotary_dim / 2, c, s);
        for (long h = 0; h < k_heads; h++) NAME(rotate)(k + r * k_stride + h * head_dim, rotary_dim / 2, c, s);
    }
}

static void NAME(silu_mul)(const T *gate_up, long in_stride, T *out, long out_stride, long rows, long n) {
    for (long r = 0; r < rows; r++) {
        const T *restrict gate = gate_up + r * in_stride, *restrict up = gate + n;
        T *restrict to = out + r * out_stride;
        for (long i = 0; i < n; i++) {
            const ACC g = TO_ACC(gate[i]);
            to[i] = FROM_ACC(g / (1 + EXP(-g)) * TO_ACC(up[i]));
        }
    }
}

/* Stored numbers to scratch, in the order that chunk loads give, padded with zeros to whole chunks. */
static void NAME(widen)(const T *x, long n, ACC *out) {
    VACC lo, hi;
    long i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        LOAD_T(x + i, &lo, &hi);
        STORE_A(out + i, lo, hi);
    }
    if (i < n) {
        T rest[CHUNK] = {0};
        memcpy(rest, x + i, (size_t)(n - i) * sizeof(T));
        LOAD_T(rest, &lo, &hi);
        STORE_A(out + i, lo, hi);
    }
}

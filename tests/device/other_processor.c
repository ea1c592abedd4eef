/* The kernels on a processor other than this one: products, also with packed weights and with integers, and attention
 * against plain loops in double, and rows alone against rows together. Built with the other's compiler, run by an emulator
 * (test_other_processors.py). */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int jettison_portable_linear(int, const void *, long, const void *, long, const void *, void *, long, int, long, long,
                             long, int);
int jettison_portable_pack_rows(int, const void *, long, long, long, long, long, void *);
int jettison_portable_linear_slab(int, const int64_t *, const void *, long, const void *, const void *, void *, long,
                                      int, long, long, long, int);
int jettison_portable_pack_integers(const int64_t *, const int8_t *, const uint16_t *, long, const uint16_t *, long, long,
                                    long, long, void *);
int jettison_portable_write_kv(int, const void *, long, const void *, long, void *, long, long, long, long,
                               const int32_t *, long, long, const int32_t *, const int32_t *, long, long);
int jettison_portable_attention(int, const void *, long, long, const void *, long, long, long, long, const int32_t *,
                                long, long, const int32_t *, const int32_t *, long, long, void *, long, void *, int,
                                const int32_t *, long, double, double, int);

static int failures, checks;

static uint64_t state = 88172645463325252u;
static double draw(void) { /* [-1, 1) */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) / (double)(1ull << 52) - 1;
}

static long size_of(int dtype) { return dtype == 0 ? 8 : dtype == 1 ? 4 : 2; }

static double get(int dtype, const void *p, long i) {
    if (dtype == 0) return ((const double *)p)[i];
    if (dtype == 1) return ((const float *)p)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static void *numbers(int dtype, long n) {
    char *all = malloc((size_t)(n * size_of(dtype)));
    for (long i = 0; i < n; i++) {
        const double x = draw();
        const float narrow = (float)x;
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        const uint16_t half = (uint16_t)(bits >> 16);
        if (dtype == 0) memcpy(all + 8 * i, &x, 8);
        else if (dtype == 1) memcpy(all + 4 * i, &narrow, 4);
        else memcpy(all + 2 * i, &half, 2);
    }
    return all;
}

static void expect(int is_true, const char *what, int dtype, long i) {
    checks++;
    if (!is_true && failures++ < 10) printf("%s, dtype %d, at %ld\n", what, dtype, i);
}

static const double TOLERANCE[] = {1e-12, 1e-5, 1e-2};

static void check_products(int dtype, long rows, long n, long k) {
    const long bytes = size_of(dtype);
    void *const x = numbers(dtype, rows * k), *const w = numbers(dtype, n * k), *const bias = numbers(dtype, n);
    char *const packed = malloc((size_t)(n * k * bytes)), *const out = malloc((size_t)(rows * n * bytes));
    char *const one = malloc((size_t)(n * bytes));
    for (int is_packed = 0; is_packed < (dtype == 0 ? 1 : 2); is_packed++) {
        if (is_packed) {
            expect(jettison_portable_pack_rows(dtype, w, k, 0, n, n, k, packed) == 0, "pack_rows", dtype, 0);
            jettison_portable_linear_slab(dtype, NULL, x, k, packed, bias, out, n, 0, rows, n, k, 2);
        } else jettison_portable_linear(dtype, x, k, w, k, bias, out, n, 0, rows, n, k, 2);
        for (long row = 0; row < rows; row++) {
            for (long i = 0; i < n; i++) {
                double sum = get(dtype, bias, i), size = fabs(sum);
                for (long j = 0; j < k; j++) {
                    const double product = get(dtype, x, row * k + j) * get(dtype, w, i * k + j);
                    sum += product, size += fabs(product);
                }
                expect(fabs(get(dtype, out, row * n + i) - sum) <= TOLERANCE[dtype] * size, "product", dtype, i);
            }
            const char *const from = (const char *)x + row * k * bytes;
            if (is_packed) jettison_portable_linear_slab(dtype, NULL, from, k, packed, bias, one, n, 0, 1, n, k, 1);
            else jettison_portable_linear(dtype, from, k, w, k, bias, one, n, 0, 1, n, k, 1);
            expect(memcmp(one, out + row * n * bytes, (size_t)(n * bytes)) == 0, "a row alone", dtype, row);
        }
    }
    free(x), free(w), free(bias), free(packed), free(out), free(one);
}

/* Scales of 2^-3 to 2^-6 and offsets of -3 to 4, in float16. */
static void check_integers(int dtype, long rows, long n, long k, long bits, long offset) {
    const int64_t form[4] = {bits, 32, 0, offset};
    const long groups = k / 32, bytes = size_of(dtype);
    int8_t *const whole = malloc((size_t)(n * k));
    uint16_t *const scales = malloc((size_t)(n * groups * 2)), *const offsets = malloc((size_t)(n * groups * 2));
    static const uint16_t small[8] = {0xc200, 0xc000, 0xbc00, 0, 0x3c00, 0x4000, 0x4200, 0x4400};
    for (long i = 0; i < n * k; i++) whole[i] = (int8_t)(draw() * (bits == 4 ? 8 : 128));
    for (long i = 0; i < n * groups; i++) scales[i] = (uint16_t)((12 - i % 4) << 10), offsets[i] = small[i % 8];
    char *const packed = malloc((size_t)(n * (k * bits / 8 + groups * 4))), *const x = numbers(dtype, rows * k);
    char *const out = malloc((size_t)(rows * n * bytes)), *const one = malloc((size_t)(n * bytes));
    jettison_portable_pack_integers(form, whole, scales, groups, offset ? offsets : NULL, groups, 0, n, k, packed);
    jettison_portable_linear_slab(dtype, form, x, k, packed, NULL, out, n, 0, rows, n, k, 2);
    for (long row = 0; row < rows; row++) {
        for (long i = 0; i < n; i++) {
            double sum = 0, size = 0;
            for (long j = 0; j < k; j++) {
                const long at = i * groups + j / 32;
                const double scale = pow(2, -3.0 - (double)(at % 4)), shift = offset ? (double)(at % 8) - 3 : 0;
                const double q = whole[i * k + j], w = offset == 2 ? scale * (q + 8) + shift : scale * (q + shift);
                const double product = get(dtype, x, row * k + j) * w;
                sum += product, size += fabs(product);
            }
            expect(fabs(get(dtype, out, row * n + i) - sum) <= TOLERANCE[dtype] * size, "integers", dtype, i);
        }
        jettison_portable_linear_slab(dtype, form, x + row * k * bytes, k, packed, NULL, one, n, 0, 1, n, k, 1);
        expect(memcmp(one, out + row * n * bytes, (size_t)(n * bytes)) == 0, "integers, a row alone", dtype, row);
    }
    free(whole), free(scales), free(offsets), free(packed), free(x), free(out), free(one);
}

enum { HEADS = 6, KV_HEADS = 2, BLOCK = 8, BLOCKS = 24, TOKENS = 150 };

static void check_attention(int dtype, long dim, long window, double softcap) {
    const long bytes = size_of(dtype), q_size = HEADS * dim, kv_size = KV_HEADS * dim, group = HEADS / KV_HEADS;
    char *const q = numbers(dtype, TOKENS * q_size);
    void *const k = numbers(dtype, TOKENS * kv_size), *const v = numbers(dtype, TOKENS * kv_size);
    void *const arena = numbers(dtype, BLOCKS * 2 * KV_HEADS * BLOCK * dim);
    char *const out = malloc((size_t)(TOKENS * q_size * bytes)), *const one = malloc((size_t)(q_size * bytes));
    int32_t table[BLOCKS], tokens = TOKENS, none = 0, single = 1;
    for (int i = 0; i < BLOCKS; i++) table[i] = (i * 7 + 3) % BLOCKS;
    expect(jettison_portable_write_kv(dtype, k, kv_size, v, kv_size, arena, BLOCKS, KV_HEADS, BLOCK, dim, table, BLOCKS,
                                      BLOCKS, &tokens, &none, 1, TOKENS) == 0, "write_kv", dtype, 0);
    const double scale = 1 / sqrt((double)dim);
    expect(jettison_portable_attention(dtype, q, q_size, HEADS, arena, BLOCKS, KV_HEADS, BLOCK, dim, table, BLOCKS,
                                       BLOCKS, &tokens, &none, 1, TOKENS, out, q_size, NULL, 0, NULL, window, softcap,
                                       scale, 2) == 0,
           "attention", dtype, 0);
    for (int32_t token = 0; token < TOKENS; token += 7) {
        for (long head = 0; head < HEADS; head++) {
            double weights[TOKENS], total = 0;
            const long from = window > 0 && token + 1 > window ? token + 1 - window : 0;
            for (long j = from; j <= token; j++) {
                double score = 0;
                for (long i = 0; i < dim; i++)
                    score += get(dtype, q, token * q_size + head * dim + i) *
                             get(dtype, k, j * kv_size + head / group * dim + i);
                score = softcap > 0 ? softcap * tanh(score * scale / softcap) : score * scale;
                total += weights[j] = exp(score);
            }
            for (long i = 0; i < dim; i++) {
                double sum = 0;
                for (long j = from; j <= token; j++)
                    sum += weights[j] / total * get(dtype, v, j * kv_size + head / group * dim + i);
                const double error = fabs(get(dtype, out, token * q_size + head * dim + i) - sum);
                expect(error <= TOLERANCE[dtype], "attention", dtype, token);
            }
        }
        jettison_portable_attention(dtype, q + token * q_size * bytes, q_size, HEADS, arena, BLOCKS, KV_HEADS, BLOCK,
                                    dim, table, BLOCKS, BLOCKS, &single, &token, 1, 1, one, q_size, NULL, 0, NULL, window,
                                    softcap, scale, 1);
        expect(memcmp(one, out + token * q_size * bytes, (size_t)(q_size * bytes)) == 0, "a token alone", dtype, token);
    }
    free(q), free(k), free(v), free(arena), free(out), free(one);
}

int main(void) {
    for (int dtype = 0; dtype < 3; dtype++) {
        check_products(dtype, 37, 75, 96);
        check_products(dtype, 5, 32, 544);
        check_attention(dtype, 64, 0, 0);
        check_attention(dtype, 20, 0, 0);
        check_attention(dtype, 64, 70, 0);
        check_attention(dtype, 20, 9, 2);
    }
    for (int dtype = 1; dtype < 3; dtype++) {
        check_integers(dtype, 37, 64, 96, 4, 2);
        check_integers(dtype, 11, 96, 544, 8, 1);
    }
    printf("%d of %d checks failed\n", failures, checks);
    return failures > 0 || checks == 0;
}

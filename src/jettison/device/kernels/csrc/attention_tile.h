/* The two products of attention over one tile of keys and values.
 *
 * Included once for each form of keys and values, with
 *   FORM(name)   name of a function for this form
 *   KV, LOAD_KV  type of their elements, chunk load compatible with LOAD_A on scratch
 *
 * Sums run along the head dimension in chunks (scores) and over ascending positions (values), whatever the number
 * of rows taken together.
 */

/* scores[m][j] = q[m] . keys[j] for mr rows and four keys. */
INLINE void FORM(scores)(const int mr, const ACC *q, long width, const KV *const *keys, ACC *scores) {
    VACC acc[4][3], lo[3], hi[3], key_lo, key_hi;
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++)
#pragma GCC unroll 3
        for (int m = 0; m < mr; m++) acc[n][m] = (VACC){0};
    for (long i = 0; i < width; i += CHUNK) {
#pragma GCC unroll 3
        for (int m = 0; m < mr; m++) LOAD_A(q + m * width + i, &lo[m], &hi[m]);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            LOAD_KV(keys[n] + i, &key_lo, &key_hi);
#pragma GCC unroll 3
            for (int m = 0; m < mr; m++) acc[n][m] += lo[m] * key_lo;
#pragma GCC unroll 3
            for (int m = 0; m < mr; m++) acc[n][m] += hi[m] * key_hi;
        }
    }
#pragma GCC unroll 3
    for (int m = 0; m < mr; m++) SUM4(acc[0][m], acc[1][m], acc[2][m], acc[3][m], scores + m * KEY_TILE);
}

/* out[m][column..] += sum over j of weights[m][j] * values[j][column..], for mr rows and nc chunks. */
INLINE void FORM(values)(const int mr, const int nc, const ACC *weights, const KV *const *values, long count,
                         long column, ACC *out, long width) {
    VACC lo[6][4], hi[6][4], value_lo, value_hi;
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
        for (int c = 0; c < nc; c++) LOAD_A(out + m * width + column + c * CHUNK, &lo[m][c], &hi[m][c]);
    for (long j = 0; j < count; j++) {
        const KV *value = values[j] + column;
#pragma GCC unroll 4
        for (int c = 0; c < nc; c++) {
            LOAD_KV(value + c * CHUNK, &value_lo, &value_hi);
#pragma GCC unroll 6
            for (int m = 0; m < mr; m++) {
                lo[m][c] += value_lo * weights[m * KEY_TILE + j];
                hi[m][c] += value_hi * weights[m * KEY_TILE + j];
            }
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
        for (int c = 0; c < nc; c++) STORE_A(out + m * width + column + c * CHUNK, lo[m][c], hi[m][c]);
}

/* All rows against `count` keys, rounded up to four (the pointers beyond are the last key's again). */
static void FORM(all_scores)(long rows, const ACC *q, long width, const KV *const *keys, long count, ACC *scores) {
    for (long j = 0; j < count; j += 4) {
        long m = 0;
        for (; m + 3 <= rows; m += 3) FORM(scores)(3, q + m * width, width, keys + j, scores + m * KEY_TILE + j);
        if (rows - m == 2) FORM(scores)(2, q + m * width, width, keys + j, scores + m * KEY_TILE + j);
        if (rows - m == 1) FORM(scores)(1, q + m * width, width, keys + j, scores + m * KEY_TILE + j);
    }
}

/* `mr` rows: nc chunks at a time, then one at a time. */
INLINE void FORM(values_row)(const int mr, const int nc, const ACC *weights, const KV *const *values, long count,
                             ACC *out, long width) {
    long column = 0;
    for (; column + nc * CHUNK <= width; column += nc * CHUNK)
        FORM(values)(mr, nc, weights, values, count, column, out, width);
    if (nc > 1)
        for (; column < width; column += CHUNK) FORM(values)(mr, 1, weights, values, count, column, out, width);
}

static void FORM(all_values)(long rows, const ACC *weights, const KV *const *values, long count, long width, ACC *out) {
    for (long m = 0; m < rows; m += 6, weights += 6 * KEY_TILE, out += 6 * width) {
        switch (rows - m) { /* as many accumulators as registers hold: 2 * mr * nc */
        case 1: FORM(values_row)(1, 4, weights, values, count, out, width); break;
        case 2: FORM(values_row)(2, 2, weights, values, count, out, width); break;
        case 3: FORM(values_row)(3, 2, weights, values, count, out, width); break;
        case 4: FORM(values_row)(4, 1, weights, values, count, out, width); break;
        case 5: FORM(values_row)(5, 1, weights, values, count, out, width); break;
        default: FORM(values_row)(6, 1, weights, values, count, out, width); break;
        }
    }
}

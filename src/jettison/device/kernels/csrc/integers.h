/* Matrices that are kept as small integers: the order of their bytes, and what needs no dtype. Products: integer_product.h.
 *
 * A matrix [n, k] (n and k multiples of 32) is n / 32 groups of 32 outputs, one after the other, as packed.h has them.
 * Such a group has, for each group of columns: 32 scales of two bytes, 32 offsets (where there are any), then the integers
 * in lines of 128 bytes: four bytes of each output, with 8 columns of 4 bits or 4 columns of 8 bits. Column c of a line is
 * at bit c % 2 * 16 + c / 2 * bits of the four bytes: so half a line, seen as 16-bit words, has an output's pairs of
 * columns side by side, as VDPBF16PS and the rows of a tile want them. Integers are two's complements. All that a thread
 * reads for 32 outputs is one contiguous stream.
 */
#ifndef JETTISON_INTEGERS_H
#define JETTISON_INTEGERS_H

#include "simd.h"

#define OUTPUTS 32 /* whose integers lie together */
#define STEP 32    /* columns that are summed before they are scaled, or a part of them */
#define LINE_BYTES 128
#define STEP_BYTES(bits) (STEP * OUTPUTS * (bits) / 8)

enum { OFFSET_NONE, OFFSET_ZERO, OFFSET_MIN };

/* IntegerForm of model/integers.py; all of 64 bits, as bound.py writes it. */
typedef struct {
    long bits, group_size, is_bfloat16, offset;
} Form;

/* NULL for other matrices. */
INLINE const Form *form_of(const Form *form) { return form->bits ? form : NULL; }

INLINE long head_bytes(const Form *form) { return (form->offset ? 4 : 2) * OUTPUTS; }

/* Of 32 outputs and a group of columns. */
INLINE long columns_bytes(const Form *form) {
    return head_bytes(form) + form->group_size / STEP * STEP_BYTES(form->bits);
}

/* Of 32 outputs. */
INLINE long outputs_bytes(const Form *form, long k) { return k / form->group_size * columns_bytes(form); }

/* The integer of a column of a line, from an output's four bytes. */
INLINE int32_t integer_at(uint32_t four, int bits, int column) {
    const int at = column % 2 * 16 + column / 2 * bits;
    return (int32_t)(four << (32 - bits - at)) >> (32 - bits);
}

/* An output's four bytes of a line, from integers of its columns. */
INLINE uint32_t four_bytes(const int8_t *integers, int bits) {
    uint32_t four = 0;
    for (int c = 0; c < 32 / bits; c++)
        four |= ((uint32_t)(uint8_t)integers[c] & ((1u << bits) - 1)) << (c % 2 * 16 + c / 2 * bits);
    return four;
}

/* A scale or offset of a head. */
INLINE float head_number(const uint8_t *head, long i, long is_bfloat16) {
    uint16_t bits;
    memcpy(&bits, head + 2 * i, 2);
    if (is_bfloat16) return bf16_to_f32(bits);
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float number;
    memcpy(&number, &wide, 4);
    number *= 0x1p112f; /* exponents of 5 bits */
    memcpy(&wide, &number, 4);
    wide |= (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    wide |= (uint32_t)(bits & 0x8000) << 16;
    memcpy(&number, &wide, 4);
    return number;
}

/* A vector of them. */
INLINE vf32 head_numbers(const uint8_t *head, long is_bfloat16) {
    typedef uint16_t Halves __attribute__((vector_size(VEC_BYTES / 2), aligned(2), may_alias));
    const vu32 bits = __builtin_convertvector(*(const Halves *)head, vu32);
    if (is_bfloat16) return (vf32)(bits << 16);
#if VEC_BYTES == 64
    return (vf32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)head));
#else
    const vu32 number = (vu32)((vf32)((bits & 0x7fff) << 13) * 0x1p112f);
    const vu32 special = (vu32)((bits & 0x7c00) == 0x7c00) & 0x7f800000u;
    return (vf32)(number | special | (bits & 0x8000) << 16);
#endif
}

/* Plain rows [first, first + count), with their scales and offsets, into their places in a matrix of k columns. */
static void pack_integers(const Form *form, const int8_t *rows, const uint16_t *scales, long scales_stride,
                          const uint16_t *offsets, long offsets_stride, long first, long count, long k,
                          uint8_t *packed) {
    const int bits = (int)form->bits, wide = 32 / bits;
    const long groups = k / form->group_size;
    for (long i = 0; i < count; i++) {
        const long lane = (first + i) % OUTPUTS;
        const int8_t *from = rows + i * k;
        uint8_t *head = packed + (first + i) / OUTPUTS * outputs_bytes(form, k);
        for (long group = 0; group < groups; group++, head += columns_bytes(form)) {
            memcpy(head + 2 * lane, scales + i * scales_stride + group, 2);
            if (offsets) memcpy(head + 2 * (OUTPUTS + lane), offsets + i * offsets_stride + group, 2);
            uint8_t *line = head + head_bytes(form) + 4 * lane;
            for (long c = 0; c < form->group_size; c += wide, from += wide, line += LINE_BYTES) {
                const uint32_t four = bits == 4 ? four_bytes(from, 4) : four_bytes(from, 8);
                memcpy(line, &four, 4);
            }
        }
    }
}

#endif

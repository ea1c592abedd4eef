/* Tile registers (AMX) for products of bfloat16: eight tiles of 16 rows of 64 bytes.
 *
 * Instructions are written out, so that the compiler needs no flag for them, and each says which memory it touches:
 * intrinsics of GCC 12 do not. With EMULATE_TILES a plain C model stands in for the registers (tests, where there are none); its
 * order of sums is the processor's: even and odd k in chains of their own over a tile's 32 k, added, then added to the
 * sum so far.
 */
#ifndef JETTISON_TILES_H
#define JETTISON_TILES_H

#include <stdint.h>
#include <string.h>

#define TILE_ROWS_OF_X 16
#define TILE_BYTES 1024

#ifdef EMULATE_TILES
#include <math.h>
static __thread uint8_t tile_model[8][TILE_BYTES];
#define TILE_ZERO(t) memset(tile_model[t], 0, TILE_BYTES)
#define TILE_LOAD(t, base, stride)                                                                                   \
    for (int r_ = 0; r_ < 16; r_++) memcpy(tile_model[t] + r_ * 64, (const char *)(base) + r_ * (long)(stride), 64)
#define TILE_STORE(t, base, stride)                                                                                  \
    for (int r_ = 0; r_ < 16; r_++) memcpy((char *)(base) + r_ * (long)(stride), tile_model[t] + r_ * 64, 64)
#define TILE_MULTIPLY(c, a, b) tile_multiply_model(c, a, b)
static void tile_multiply_model(int c, int a, int b) {
    float *sums = (float *)tile_model[c];
    const uint16_t *x = (const uint16_t *)tile_model[a], *w = (const uint16_t *)tile_model[b];
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float part[2] = {0, 0};
            for (int p = 0; p < 16; p++)
                for (int e = 0; e < 2; e++) {
                    const uint32_t left = (uint32_t)x[m * 32 + 2 * p + e] << 16;
                    const uint32_t right = (uint32_t)w[p * 32 + 2 * n + e] << 16;
                    float l, r;
                    memcpy(&l, &left, 4);
                    memcpy(&r, &right, 4);
                    part[e] = fmaf(l, r, part[e]);
                }
            sums[m * 16 + n] += part[0] + part[1];
        }
}
static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
#else
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, base, stride)                                                                                   \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(base), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, base, stride)                                                                                  \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(base), "r"((long)(stride)) : "memory")
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

/* A thread's own, and others (torch) change it: set at the beginning of every product, given up at its end. */
static inline void tiles_begin(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } all = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _Static_assert(sizeof all == 64, "the operand of ldtilecfg");
    __asm__ volatile("ldtilecfg (%0)" ::"r"(&all) : "memory");
}
static inline void tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#endif

#endif

/* Which variants of the kernels are in this library, and whether this CPU can run them. */
#include <string.h>

#if defined(HAVE_AMXBF16) && defined(__linux__)
#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XTILE_DATA 18

static sigjmp_buf tiles_refused;
static void refuse_tiles(int signal) { (void)signal; siglongjmp(tiles_refused, 1); }

/* 1 if the processor has tiles for bfloat16, the operating system gives this process leave to use them, and they
 * can be used (a hypervisor may say yes and mean no). Before other threads use them. */
static int has_tiles(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24)) return 0;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILE_DATA) != 0) return 0;
    struct sigaction refuse, before;
    memset(&refuse, 0, sizeof refuse);
    refuse.sa_handler = refuse_tiles;
    if (sigaction(SIGILL, &refuse, &before) != 0) return 0;
    volatile int works = 0;
    if (sigsetjmp(tiles_refused, 1) == 0) {
        tiles_begin();
        TILE_ZERO(0);
        TILE_ZERO(4);
        TILE_ZERO(6);
        TILE_MULTIPLY(0, 4, 6);
        tiles_end();
        works = 1;
    }
    sigaction(SIGILL, &before, NULL);
    return works;
}
#endif

#define EXPORT __attribute__((visibility("default")))
#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)

/* A digest of the sources and flags; the caller refuses a library built from others (the ABI may differ). */
EXPORT const char *jettison_build_id(void) { return QUOTE(BUILD_ID); }

/* Space-separated names, best first. */
EXPORT const char *jettison_variants(void) { return VARIANTS; }

/* 1 if the CPU (and the operating system, for the wide registers) supports the variant. */
EXPORT int jettison_cpu_supports(const char *variant) {
    if (strcmp(variant, "portable") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(variant, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (strcmp(variant, "avx512") == 0) return avx512;
#if defined(HAVE_AMXBF16) && defined(__linux__)
    if (strcmp(variant, "amxbf16") == 0) return avx512 && __builtin_cpu_supports("avx512bf16") && has_tiles();
#endif
#ifdef HAVE_AVX512BF16
    if (strcmp(variant, "avx512bf16") == 0) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
#endif
    return 0;
}

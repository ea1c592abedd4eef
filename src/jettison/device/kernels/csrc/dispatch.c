/* Which variants of the kernels are in this library, and whether this CPU can run them. */
#include <string.h>

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
#ifdef HAVE_AVX512BF16
    if (strcmp(variant, "avx512bf16") == 0) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
#endif
    return 0;
}

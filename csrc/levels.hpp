// The instruction sets that the kernels are compiled for.
#pragma once

// FASTWEIGHTS_LEVEL_v4(X, T), where the processor has such a level: X(T, level, target attribute, bytes of a vector
// register).
#if defined(__x86_64__) && (defined(__linux__) || defined(_WIN32)) && defined(__GNUC__)
#define FASTWEIGHTS_X86_LEVELS 1
#ifdef __clang__
// An `arch=` does not bring back what the command line takes away by name, as zig's does with all that the baseline lacks:
// the code would be that of the baseline, under three names.
#define FASTWEIGHTS_V3 "avx,avx2,bmi,bmi2,cx16,f16c,fma,lzcnt,movbe,popcnt,sahf,sse3,sse4.1,sse4.2,ssse3"
#define FASTWEIGHTS_V4 FASTWEIGHTS_V3 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#else
#define FASTWEIGHTS_V3 "arch=x86-64-v3"
#define FASTWEIGHTS_V4 "arch=x86-64-v4"
#endif
#define FASTWEIGHTS_LEVEL_v4(X, T) X(T, v4, __attribute__((target(FASTWEIGHTS_V4))), 64)
#define FASTWEIGHTS_LEVEL_v3(X, T) X(T, v3, __attribute__((target(FASTWEIGHTS_V3))), 32)
#else
#define FASTWEIGHTS_LEVEL_v4(X, T)
#define FASTWEIGHTS_LEVEL_v3(X, T)
#endif
#define FASTWEIGHTS_LEVEL_base(X, T) X(T, base, , 16)
#define FASTWEIGHTS_FOR_EACH_LEVEL(X, T) FASTWEIGHTS_LEVEL_v4(X, T) FASTWEIGHTS_LEVEL_v3(X, T) FASTWEIGHTS_LEVEL_base(X, T)

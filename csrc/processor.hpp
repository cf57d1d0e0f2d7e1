// Which level of x86-64 the processor has, as the psABI defines them, and the system saves the registers of.
#pragma once

#include <cpuid.h>

namespace fastweights {

// Every compiler has __builtin_cpu_supports; with some (zig's, which builds the wheels) it always answers no.
inline int x86_64_level() {
    unsigned a, b, c, d, wide, more;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
    // SSE3, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2, MOVBE, POPCNT, OSXSAVE, AVX, F16C
    constexpr unsigned first = 1u | 1u << 9 | 1u << 12 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 22 | 1u << 23 | 1u << 27 |
                               1u << 28 | 1u << 29;
    if ((c & first) != first) return 1;
    if (!__get_cpuid_count(7, 0, &a, &wide, &c, &d) || !__get_cpuid(0x80000001, &a, &b, &more, &d)) return 1;
    unsigned saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    constexpr unsigned second = 1u << 3 | 1u << 5 | 1u << 8;  // BMI1, AVX2, BMI2
    constexpr unsigned extended = 1u | 1u << 5;               // LAHF, LZCNT
    constexpr unsigned halves = 0x6, wholes = 0xe6;           // of the registers of AVX and of AVX-512
    if ((wide & second) != second || (more & extended) != extended || (saved & halves) != halves) return 1;
    constexpr unsigned third = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // AVX-512 F, DQ, CD, BW, VL
    return (wide & third) == third && (saved & wholes) == wholes ? 4 : 3;
}

}  // namespace fastweights

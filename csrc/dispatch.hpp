// One copy of a kernel for each instruction set, the best that the processor has chosen when the library loads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "levels.hpp"

#ifdef _WIN32
#define FASTWEIGHTS_EXPORT extern "C" __declspec(dllexport)
#else
#define FASTWEIGHTS_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#ifdef FASTWEIGHTS_X86_LEVELS
#include "processor.hpp"
#define FASTWEIGHTS_DISPATCH(NAME, ...)                                            \
    switch (Level::current().bytes) {                                              \
        case 64: NAME##_v4(__VA_ARGS__); break;                                    \
        case 32: NAME##_v3(__VA_ARGS__); break;                                    \
        default: NAME##_base(__VA_ARGS__);                                         \
    }
#else
#define FASTWEIGHTS_DISPATCH(NAME, ...) NAME##_base(__VA_ARGS__)
#endif

namespace fastweights {

// What decays towards zero must get there: a fast matrix whose entries are denormal takes ten times as long to read, and
// rounding to the nearest would keep it so for ever. The thread's own setting comes back at the end.
struct FlushDenormals {
#ifdef FASTWEIGHTS_X86_LEVELS
    const unsigned before = __builtin_ia32_stmxcsr();
    FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }  // flush results to zero, read operands as zero
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    const std::uint64_t before = read();
    FlushDenormals() { write(before | std::uint64_t(1) << 24); }  // the same two in one bit
    ~FlushDenormals() { write(before); }
    static std::uint64_t read() {
        std::uint64_t control;
        __asm__ volatile("mrs %0, fpcr" : "=r"(control)::"memory");
        return control;
    }
    static void write(std::uint64_t control) { __asm__ volatile("msr fpcr, %0" ::"r"(control) : "memory"); }
#else
    FlushDenormals() {}
#endif
    FlushDenormals(const FlushDenormals&) = delete;
};

struct Level {
    int bytes;
    const char* name;

    static const Level& current() {
        static const Level level = choose();
        return level;
    }

  private:
    // FASTWEIGHTS_CPU_LEVEL=x86-64-v3 (or baseline) asks for less than the processor has: how the tests reach every copy.
    static Level choose() {
#ifdef FASTWEIGHTS_X86_LEVELS
        const char* const wish = std::getenv("FASTWEIGHTS_CPU_LEVEL");
        const bool baseline = wish && std::strcmp(wish, "baseline") == 0;
        const bool v3 = wish && std::strcmp(wish, "x86-64-v3") == 0;
        const int highest = baseline ? 1 : x86_64_level();
        if (!v3 && highest >= 4) return {64, "x86-64-v4"};
        if (highest >= 3) return {32, "x86-64-v3"};
#endif
#ifdef __aarch64__
        return {16, "neon"};
#else
        return {16, "baseline"};
#endif
    }
};

// So many numbers and as many zeros as fill the last register.
template <class T>
std::int64_t whole_registers(std::int64_t numbers) {
    const std::int64_t width = Level::current().bytes / sizeof(T);
    return (numbers + width - 1) / width * width;
}

}  // namespace fastweights

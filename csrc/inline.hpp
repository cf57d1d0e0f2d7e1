// How the parts of a kernel become code for an instruction set: most are inlined into a caller that is compiled for one.
#pragma once

#include "levels.hpp"

// A part that is long enough for a call to cost nothing, and that several places call: a unit that is compiled for one
// level, which CMakeLists.txt names, has it once, as a function for that level. Every inlined copy would be compiled again,
// and the compiler's time grows faster than a function.
#ifdef FASTWEIGHTS_LEVEL
#define FASTWEIGHTS_TARGET_OF(T, NAME, TARGET, BYTES) TARGET
#define FASTWEIGHTS_TARGET FASTWEIGHTS_LEVEL(FASTWEIGHTS_TARGET_OF, )
#define FASTWEIGHTS_OUTLINE __attribute__((noinline)) FASTWEIGHTS_TARGET
#else
#define FASTWEIGHTS_TARGET
#define FASTWEIGHTS_OUTLINE FASTWEIGHTS_INLINE
#endif

// Clang refuses to pass a vector register between functions of different levels, even where one is inlined into the other.
#ifdef __clang__
#define FASTWEIGHTS_INLINE inline __attribute__((always_inline)) FASTWEIGHTS_TARGET
#define FASTWEIGHTS_INLINE_LAMBDA __attribute__((always_inline)) FASTWEIGHTS_TARGET
#else
#define FASTWEIGHTS_INLINE inline __attribute__((always_inline))
#define FASTWEIGHTS_INLINE_LAMBDA __attribute__((always_inline))
#endif

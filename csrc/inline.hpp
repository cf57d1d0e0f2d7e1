// A kernel's parts are inlined into a caller that is compiled for one instruction set, and so become code for that set.
#pragma once

#include "levels.hpp"

#define FASTWEIGHTS_INLINE inline __attribute__((always_inline))
#define FASTWEIGHTS_INLINE_LAMBDA __attribute__((always_inline))

// A part that is long enough for a call to cost nothing, and that several places call: a unit that is compiled for one
// level, which CMakeLists.txt names, has it once, as a function for that level. Every copy would be compiled again, and
// the compiler's time grows faster than a function.
#ifdef FASTWEIGHTS_LEVEL
#define FASTWEIGHTS_TARGET_OF(T, NAME, TARGET, BYTES) TARGET
#define FASTWEIGHTS_OUTLINE __attribute__((noinline)) FASTWEIGHTS_LEVEL(FASTWEIGHTS_TARGET_OF, )
#else
#define FASTWEIGHTS_OUTLINE FASTWEIGHTS_INLINE
#endif

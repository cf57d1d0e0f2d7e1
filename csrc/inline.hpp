// A kernel's parts are inlined into a caller that is compiled for one instruction set, and so become code for that set.
#pragma once

#define FASTWEIGHTS_INLINE inline __attribute__((always_inline))
#define FASTWEIGHTS_INLINE_LAMBDA __attribute__((always_inline))

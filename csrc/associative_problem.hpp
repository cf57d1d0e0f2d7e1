// What a call of the associative recurrence is given, and the memory that its parts work in.
#pragma once

#include <cstdint>
#include <vector>

#include "arena.hpp"
#include "episodes.hpp"
#include "levels.hpp"

namespace fastweights {

struct Problem {
    std::int64_t steps, batch, size;
    int inner_steps, norms;  // norms: layer norms in a step
    bool tanh, normalize_initial, matrix;  // matrix: the form
    double decay, rate, eps;
};

template <class T>
struct Inputs {
    const T *drive, *weight, *gain, *shift, *hidden, *memory, *strengths;
    const std::int64_t* lengths;
    const bool *starts, *clears;
    // null: gain, shift, memory, strengths, lengths, starts, clears, where they are left out
};

// What the forward pass gives: h(1) .. h(T), the final memory (of the matrix form, or null), and the trace: what is
// within the steps, for the backward pass, or null. The trace's layout is the form's own.
template <class T>
struct Results {
    T *outputs, *final, *trace;
    std::int64_t trace_size;  // numbers
};

template <class T>
struct Gradients {
    T *drive, *weight, *gain, *shift, *hidden, *memory, *strengths;
};

// What every part of a call shares: the slow weights in the order in which they are read, the powers of the decay, and
// the episodes of the matrix form.
template <class T>
struct Shared {
    Arena arena;
    T *weight = nullptr, *weight_transposed = nullptr;
    T *gain = nullptr, *shift = nullptr;  // padded
    T* power = nullptr;                   // rate decay^k
    T* kept = nullptr;                    // decay^(t+1): what is left of the initial memory
    std::vector<Episode> episodes = {};
};

// The items from `begin` on and before `end`, at each level: associative_level.cpp.
#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    void forward_##NAME(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t begin,                 \
                        std::int64_t end, const Results<T>& out);                                                      \
    void backward_##NAME(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t begin,                \
                         std::int64_t end, const Results<T>& from, const T* grad_outputs, const Gradients<T>& out,     \
                         T* partial);
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
#undef FASTWEIGHTS_VARIANT

}  // namespace fastweights

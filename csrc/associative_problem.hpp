// What a call of the associative recurrence is given, and the memory that its parts work in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace fastweights {

struct Problem {
    std::int64_t steps, batch, size;
    int inner_steps, norms;  // norms: layer norms in a step
    bool tanh, normalize_initial, matrix;  // matrix: the form
    double decay, rate, eps;
};

template <class T>
struct Inputs {
    const T *drive, *weight, *gain, *shift, *hidden, *memory;  // gain, shift and memory may be null
    const std::int64_t* lengths;                               // may be null
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
    T *drive, *weight, *gain, *shift, *hidden, *memory;
};

struct Arena {  // one block of aligned memory, cut up in order
    // Every piece begins on a cache line: a register that is read across two costs twice.
    static constexpr std::size_t line = 64;
    static constexpr std::size_t most_pieces = 32;  // of which each may leave the rest of a line

    std::unique_ptr<void, void (*)(void*)> block;
    std::size_t size, used = 0;

    explicit Arena(std::size_t bytes)
        : block(nullptr, std::free), size((bytes / line + 1 + most_pieces) * line) {
        block.reset(std::aligned_alloc(line, size));
        if (!block) throw std::bad_alloc();
    }
    template <class Row>
    Row* take(std::int64_t rows) {
        Row* start = reinterpret_cast<Row*>(static_cast<char*>(block.get()) + used);
        used += (rows * sizeof(Row) + line - 1) / line * line;
        if (used > size) throw std::length_error("an arena was counted too small");
        return start;
    }
    template <class Row>
    Row* take_zeroed(std::int64_t rows) {
        return static_cast<Row*>(std::memset(take<Row>(rows), 0, rows * sizeof(Row)));
    }
};

// What every part of a call shares: the slow weights in the order in which they are read, and the powers of the decay.
template <class T>
struct Shared {
    Arena arena;
    T *weight = nullptr, *weight_transposed = nullptr;
    T *gain = nullptr, *shift = nullptr;  // padded
    T* power = nullptr;                   // rate decay^k
    T* kept = nullptr;                    // decay^(t+1): what is left of the initial memory
};

}  // namespace fastweights

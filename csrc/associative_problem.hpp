// What a call of the associative recurrence is given, and the memory that its parts work in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace fastweights {

struct Problem {
    std::int64_t steps, batch, size;
    int inner_steps;
    bool tanh, normalize_initial, matrix;  // matrix: the form
    double decay, rate, eps;
};

template <class T>
struct Inputs {
    const T *drive, *weight, *gain, *shift, *hidden, *memory;  // gain, shift and memory may be null
    const std::int64_t* lengths;                               // may be null
};

template <class T>
struct Gradients {
    T *drive, *weight, *gain, *shift, *hidden, *memory;
};

struct Arena {  // one block of aligned memory, cut up in order
    std::unique_ptr<void, void (*)(void*)> block;
    std::size_t used = 0;
    // Every piece begins on a cache line: a register that is read across two costs twice.
    static constexpr std::size_t line = 64;

    static constexpr std::size_t most_pieces = 32;  // of which each may leave the rest of a line

    explicit Arena(std::size_t bytes)
        : block(std::aligned_alloc(line, (bytes / line + 1 + most_pieces) * line), std::free) {
        if (!block) throw std::bad_alloc();
    }
    template <class Row>
    Row* take(std::int64_t rows) {
        Row* start = reinterpret_cast<Row*>(static_cast<char*>(block.get()) + used);
        used += (rows * sizeof(Row) + line - 1) / line * line;
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

// The selective scan, with src/fastweights/ops/selective_scan/reference.py as its definition.
//
//     x <- exp(delta A) x + delta u B,   y = (C x + skip u) silu(gate)      for each channel, whose state x has N numbers
//
// where delta is first given a bias and its softplus. Channels lie along the lanes of a register, and a thread takes a slice
// of the channels of a sequence: chunk by chunk of the steps, register by register of the channels, and then a few numbers of
// the states at a time, which stay in registers from step to step. The backward pass makes the states of a chunk again from
// the one before it, which is all that the forward pass keeps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "arena.hpp"
#include "columns.hpp"

namespace fastweights {

struct ScanProblem {
    std::int64_t batch, steps, channels, states;  // of packed sequences, `batch` of them are in one row of `steps`
    bool softplus;                                // the step is softplus of delta, after the bias
};

template <class T>
struct ScanInputs {
    const T *u, *delta;          // [B,T,D]
    const T* a;                  // [N,D]
    const T *b, *c;              // [B,T,N]
    const T *bias, *skip;        // [D], or null: added to delta; how much of u passes by
    const T* gate;               // [B,T,D], or null
    const T* state;              // [B,N,D], or null
    const std::int64_t* bounds;  // where packed sequences begin, and the end of the last; or null
};

template <class T>
struct ScanResults {
    T *outputs, *final;
    T* trace;  // the state before each chunk of each sequence, [chunks,N,D], or null
};

template <class T>
struct ScanGradients {
    T *u, *delta;     // [B,T,D]
    T* a;             // [B,N,D], to be summed over the sequences
    T *b, *c;         // [slices,B,T,N], to be summed over the slices
    T *bias, *skip;   // [B,D], to be summed over the sequences, or null
    T* gate;          // [B,T,D], or null
    T* state;         // [B,N,D], or null
};

constexpr int scan_chunk = 64;
// A number of its own, so that the sums over channels are the same on any number of threads.
constexpr int scan_slices = 8;

template <class T, int Bytes>
struct SelectiveScan {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    static constexpr int width = C::width;
    static constexpr int most = Bytes == 64 ? 4 : 2;  // numbers of the states that the registers hold at a time

    const ScanProblem& p;
    const ScanInputs<T>& in;
    std::int64_t sequence, slice, row, length, first_chunk, start, end, blocks, wide, whole;

    FASTWEIGHTS_INLINE SelectiveScan(const ScanProblem& problem, const ScanInputs<T>& inputs, std::int64_t item)
        : p(problem), in(inputs), sequence(item / scan_slices), slice(item % scan_slices) {
        row = in.bounds ? in.bounds[sequence] : sequence * p.steps;
        length = in.bounds ? in.bounds[sequence + 1] - row : p.steps;
        first_chunk = in.bounds ? row / scan_chunk + sequence : sequence * ((p.steps + scan_chunk - 1) / scan_chunk);
        // Whole cache lines, where there are enough of them: two threads would write into one.
        constexpr std::int64_t unit = 64 / sizeof(T);
        const std::int64_t units = (p.channels + unit - 1) / unit;
        start = std::min(p.channels, units * slice / scan_slices * unit);
        end = std::min(p.channels, units * (slice + 1) / scan_slices * unit);
        blocks = (end - start + width - 1) / width;
        wide = p.states * width;
        whole = p.states * p.channels;
    }

    FASTWEIGHTS_INLINE void forward(const ScanResults<T>& out) const {
        Arena arena(((1 + blocks) * wide + 3 * scan_chunk * width) * sizeof(T));
        T *const a = arena.take<T>(wide), *const states = arena.take<T>(blocks * wide);
        T *const delta = arena.take<T>(scan_chunk * width), *const written = arena.take<T>(scan_chunk * width);
        T* const read = arena.take<T>(scan_chunk * width);
        for_blocks([&](std::int64_t d, T* x, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            load_matrix(in.state ? in.state + sequence * whole : nullptr, d, count, x);
        }, states);
        for (std::int64_t chunk = 0; chunk * scan_chunk < length; ++chunk) {
            const std::int64_t first = row + chunk * scan_chunk;
            const int steps = static_cast<int>(std::min<std::int64_t>(scan_chunk, row + length - first));
            for_blocks([&](std::int64_t d, T* x, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                load_matrix(in.a, d, count, a);
                if (out.trace) store_matrix(x, d, count, trace_at(out.trace, chunk));
                for_steps(steps, first, d, [&](int at, std::int64_t place) FASTWEIGHTS_INLINE_LAMBDA {
                    const V size = size_of_step(place, d, count);
                    C::store(size, delta + at);
                    C::store(size * load(in.u + place, count), written + at);
                    ask_for_next(d, place, {in.u, in.delta, in.gate, out.outputs});
                });
                std::memset(read, 0, steps * width * sizeof(T));
                for_teams([&](int n, auto team) FASTWEIGHTS_INLINE_LAMBDA {
                    run<team>(steps, first, n, a, delta, written, x + n * width, x + n * width, read,
                              [](int, V*, V*) FASTWEIGHTS_INLINE_LAMBDA {});
                });
                const V skip = in.skip ? load(in.skip + d, count) : V{};
                for_steps(steps, first, d, [&](int at, std::int64_t place) FASTWEIGHTS_INLINE_LAMBDA {
                    V y = C::load(read + at);
                    if (in.skip) y += skip * load(in.u + place, count);
                    if (in.gate) y *= silu(load(in.gate + place, count));
                    store(y, count, out.outputs + place);
                });
            }, states);
        }
        for_blocks([&](std::int64_t d, T* x, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            store_matrix(x, d, count, out.final + sequence * whole);
        }, states);
    }

    FASTWEIGHTS_INLINE void backward(const T* trace, const T* grad_outputs, const T* grad_final,
                                     const ScanGradients<T>& to) const {
        const std::int64_t teams = p.states / most + p.states % most;
        Arena arena(((2 + 2 * blocks) * wide + 2 * blocks * width + (7 + 2 * most + 2 * teams) * scan_chunk * width +
                     most * width) * sizeof(T));
        T *const a = arena.take<T>(wide), *const before = arena.take<T>(wide);
        T *const carried = arena.take_zeroed<T>(blocks * wide), *const grad_a = arena.take_zeroed<T>(blocks * wide);
        T *const grad_bias = arena.take_zeroed<T>(blocks * width), *const grad_skip = arena.take_zeroed<T>(blocks * width);
        const auto take_steps = [&](std::int64_t many) FASTWEIGHTS_INLINE_LAMBDA {
            return arena.take<T>(many * scan_chunk * width);
        };
        T *const delta = take_steps(1), *const u = take_steps(1), *const written = take_steps(1);
        T *const read = take_steps(1), *const grad_read = take_steps(1);
        T *const by_input = take_steps(1), *const by_decay = take_steps(1);
        T *const decays = take_steps(most), *const states = arena.take<T>((scan_chunk + 1) * most * width);
        T *const grad_b = take_steps(teams), *const grad_c = take_steps(teams);
        if (grad_final)
            for_blocks([&](std::int64_t d, T* grad, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                load_matrix(grad_final + sequence * whole, d, count, grad);
            }, carried);
        for (std::int64_t chunk = (length + scan_chunk - 1) / scan_chunk - 1; chunk >= 0; --chunk) {
            const std::int64_t first = row + chunk * scan_chunk;
            const int steps = static_cast<int>(std::min<std::int64_t>(scan_chunk, row + length - first));
            std::fill_n(grad_b, steps * teams * width, T(0));
            std::fill_n(grad_c, steps * teams * width, T(0));
            for_blocks([&](std::int64_t d, T* grad, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                const std::int64_t block = (d - start) / width;
                load_matrix(in.a, d, count, a);
                load_matrix(trace_at(trace, chunk), d, count, before);
                for_steps(steps, first, d, [&](int at, std::int64_t place) FASTWEIGHTS_INLINE_LAMBDA {
                    const V size = size_of_step(place, d, count), input = load(in.u + place, count);
                    C::store(size, delta + at);
                    C::store(input, u + at);
                    C::store(size * input, written + at);
                    V grad_y = load(grad_outputs + place, count);
                    if (in.gate) grad_y *= silu(load(in.gate + place, count));
                    C::store(grad_y, grad_read + at);
                    for (T* zeroed : {read, by_input, by_decay}) C::store(V{}, zeroed + at);
                    ask_for_next(d, place, {in.u, in.delta, in.gate, grad_outputs, to.u, to.delta, to.gate});
                });
                std::int64_t index = 0;
                for_teams([&](int n, auto team) FASTWEIGHTS_INLINE_LAMBDA {
                    std::memcpy(states, before + n * width, team * width * sizeof(T));
                    run<team>(steps, first, n, a, delta, written, states, states + steps * team * width, read,
                              [&](int t, V* decay, V* now) FASTWEIGHTS_INLINE_LAMBDA {
                                  for (int k = 0; k < team; ++k) C::store(decay[k], decays + (t * team + k) * width);
                                  for (int k = 0; k < team; ++k) C::store(now[k], states + ((t + 1) * team + k) * width);
                              });
                    run_back<team>(steps, first, n, a, {delta, written, grad_read, decays, states, by_input, by_decay},
                                   grad + n * width, grad_a + block * wide + n * width, grad_b + index * width,
                                   grad_c + index * width, teams * width);
                    ++index;
                });
                const V skip = in.skip ? load(in.skip + d, count) : V{};
                V of_bias = C::load(grad_bias + block * width), of_skip = C::load(grad_skip + block * width);
                for_steps(steps, first, d, [&](int at, std::int64_t place) FASTWEIGHTS_INLINE_LAMBDA {
                    const V input = C::load(u + at), grad_y = C::load(grad_read + at), of_input = C::load(by_input + at);
                    V of_size = C::load(by_decay + at) + of_input * input;
                    if (p.softplus) of_size *= R::softplus_slope(before_softplus(place, d, count));
                    store(of_size, count, to.delta + place);
                    of_bias += of_size;
                    of_skip += grad_y * input;
                    V of_u = of_input * C::load(delta + at);
                    if (in.skip) of_u += skip * grad_y;
                    store(of_u, count, to.u + place);
                    if (in.gate) {
                        V y = C::load(read + at);
                        if (in.skip) y += skip * input;
                        store(load(grad_outputs + place, count) * y * silu_slope(load(in.gate + place, count)), count,
                              to.gate + place);
                    }
                });
                C::store(of_bias, grad_bias + block * width);
                C::store(of_skip, grad_skip + block * width);
            }, carried);
            const std::int64_t rows = (in.bounds ? 1 : p.batch) * p.steps;
            for (int t = 0; t < steps; ++t) {
                std::int64_t index = t * teams;
                const std::int64_t place = (slice * rows + first + t) * p.states;
                for_teams([&](int n, auto team) FASTWEIGHTS_INLINE_LAMBDA {
                    store(R::template sums_over<team>(C::load(grad_b + index * width)), team, to.b + place + n);
                    store(R::template sums_over<team>(C::load(grad_c + index * width)), team, to.c + place + n);
                    ++index;
                });
            }
        }
        for_blocks([&](std::int64_t d, T* grad, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            const std::int64_t block = (d - start) / width;
            store_matrix(grad_a + block * wide, d, count, to.a + sequence * whole);
            if (to.state) store_matrix(grad, d, count, to.state + sequence * whole);
            if (to.bias) store(C::load(grad_bias + block * width), count, to.bias + sequence * p.channels + d);
            if (to.skip) store(C::load(grad_skip + block * width), count, to.skip + sequence * p.channels + d);
        }, carried);
    }

  private:
    // What the backward pass of a chunk reads, and the sums it adds to: registers of the steps, or of a team in each of them.
    struct Chunk {
        const T *delta, *written, *grad_read, *decays, *states;
        T *by_input, *by_decay;
    };

    // Takes `Team` numbers of the states through a chunk, from number n on, and adds what is read of them.
    template <int Team, class Keep>
    FASTWEIGHTS_INLINE void run(int steps, std::int64_t first, int n, const T* a, const T* delta, const T* written,
                                const T* from, T* to, T* read, Keep keep) const {
        V rate[Team], now[Team];
        for (int k = 0; k < Team; ++k) rate[k] = C::load(a + (n + k) * width);
        for (int k = 0; k < Team; ++k) now[k] = C::load(from + k * width);
        for (int t = 0; t < steps; ++t) {
            const T *const b = in.b + (first + t) * p.states + n, *const c = in.c + (first + t) * p.states + n;
            const V size = C::load(delta + t * width), write = C::load(written + t * width);
            V sum = C::load(read + t * width), decay[Team];
            for (int k = 0; k < Team; ++k) decay[k] = R::exp_anywhere(size * rate[k]);
            for (int k = 0; k < Team; ++k) {
                now[k] = decay[k] * now[k] + write * b[k];
                sum += now[k] * c[k];
            }
            C::store(sum, read + t * width);
            keep(t, decay, now);
        }
        for (int k = 0; k < Team; ++k) C::store(now[k], to + k * width);
    }

    template <int Team>
    FASTWEIGHTS_INLINE void run_back(int steps, std::int64_t first, int n, const T* a, const Chunk& chunk, T* carried,
                                     T* grad_a, T* grad_b, T* grad_c, std::int64_t pitch) const {
        V rate[Team], grad[Team], of_rate[Team], now[Team];
        for (int k = 0; k < Team; ++k) {
            rate[k] = C::load(a + (n + k) * width);
            grad[k] = C::load(carried + k * width);
            of_rate[k] = C::load(grad_a + k * width);
            now[k] = C::load(chunk.states + (steps * Team + k) * width);
        }
        for (int t = steps - 1; t >= 0; --t) {
            const T *const b = in.b + (first + t) * p.states + n, *const c = in.c + (first + t) * p.states + n;
            const V size = C::load(chunk.delta + t * width), write = C::load(chunk.written + t * width);
            const V grad_y = C::load(chunk.grad_read + t * width);
            V of_input = C::load(chunk.by_input + t * width), of_decay = C::load(chunk.by_decay + t * width);
            V of_b[Team], of_c[Team];
            for (int k = 0; k < Team; ++k) {
                const V of_state = grad[k] + grad_y * c[k];
                of_c[k] = grad_y * now[k];
                of_b[k] = of_state * write;
                of_input += of_state * b[k];
                grad[k] = of_state * C::load(chunk.decays + (t * Team + k) * width);
                now[k] = C::load(chunk.states + (t * Team + k) * width);
                const V of_log = grad[k] * now[k];
                of_decay += of_log * rate[k];
                of_rate[k] += of_log * size;
            }
            C::store(of_input, chunk.by_input + t * width);
            C::store(of_decay, chunk.by_decay + t * width);
            // Half summed: a team adds to one register of memory, not to one for each of its numbers.
            C::store(C::load(grad_b + t * pitch) + R::template fold<Team>(of_b), grad_b + t * pitch);
            C::store(C::load(grad_c + t * pitch) + R::template fold<Team>(of_c), grad_c + t * pitch);
        }
        for (int k = 0; k < Team; ++k) {
            C::store(grad[k], carried + k * width);
            C::store(of_rate[k], grad_a + k * width);
        }
    }

    // Rows of other steps lie too far apart for the processor to foresee where the next block's begin.
    FASTWEIGHTS_INLINE void ask_for_next(std::int64_t d, std::int64_t place, std::initializer_list<const T*> tensors) const {
        if (d + width >= end) return;
        for (const T* each : tensors)
            if (each) __builtin_prefetch(each + place + width, 0, 2);
    }
    template <class Count>
    FASTWEIGHTS_INLINE V before_softplus(std::int64_t place, std::int64_t d, Count count) const {
        const V delta = load(in.delta + place, count);
        return in.bias ? delta + load(in.bias + d, count) : delta;
    }
    template <class Count>
    FASTWEIGHTS_INLINE V size_of_step(std::int64_t place, std::int64_t d, Count count) const {
        const V delta = before_softplus(place, d, count);
        return p.softplus ? R::softplus(delta) : delta;
    }
    static FASTWEIGHTS_INLINE V silu(V x) { return x * R::sigmoid(x); }
    static FASTWEIGHTS_INLINE V silu_slope(V x) {
        const V gate = R::sigmoid(x);
        return gate + x * gate * (T(1) - gate);
    }

    // body(d, of the block, count) for blocks of channels of the slice: whole registers, then what is left, of a number known
    // at run time; `blockwise` has a register for each number of a state, block after block.
    template <class Body>
    FASTWEIGHTS_INLINE void for_blocks(Body body, T* blockwise) const {
        std::int64_t d = start;
        for (; d + width <= end; d += width, blockwise += wide) body(d, blockwise, std::integral_constant<int, width>{});
        if (d < end) body(d, blockwise, static_cast<int>(end - d));
    }
    // body(n, team): numbers of the states from n on, of a number known to the compiler.
    template <class Body>
    FASTWEIGHTS_INLINE void for_teams(Body body) const {
        int n = 0;
        for (; n + most <= p.states; n += most) body(n, std::integral_constant<int, most>{});
        for (; n < p.states; ++n) body(n, std::integral_constant<int, 1>{});
    }
    // body(at, place): where a step of the chunk is in scratch memory, and where its channels from d on are in a tensor.
    template <class Body>
    FASTWEIGHTS_INLINE void for_steps(int steps, std::int64_t first, std::int64_t d, Body body) const {
        for (int t = 0; t < steps; ++t) body(t * width, (first + t) * p.channels + d);
    }

    static FASTWEIGHTS_INLINE V load(const T* from, int count) {
        V x = {};
        std::memcpy(&x, from, count * sizeof(T));
        return x;
    }
    static FASTWEIGHTS_INLINE void store(V x, int count, T* to) { std::memcpy(to, &x, count * sizeof(T)); }

    // Channels from d on of a matrix [N,D], zero for null; scratch has a register for each of N.
    FASTWEIGHTS_INLINE void load_matrix(const T* from, std::int64_t d, int count, T* to) const {
        for (std::int64_t n = 0; n < p.states; ++n)
            C::store(from ? load(from + n * p.channels + d, count) : V{}, to + n * width);
    }
    FASTWEIGHTS_INLINE void store_matrix(const T* from, std::int64_t d, int count, T* to) const {
        for (std::int64_t n = 0; n < p.states; ++n) store(C::load(from + n * width), count, to + n * p.channels + d);
    }
    template <class Pointer>
    FASTWEIGHTS_INLINE Pointer trace_at(Pointer trace, std::int64_t chunk) const {
        return trace + (first_chunk + chunk) * p.states * p.channels;
    }
};

}  // namespace fastweights

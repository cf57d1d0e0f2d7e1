// The recurrence of Ba et al. 2016 in its matrix form (eq 1), one sequence or a few at a time, with
// src/fastweights/ops/associative/reference.py as its definition.
//
// The fast matrix is formed at the beginning of every chunk of steps; what was written since is read as attention to
// the chunk's own hidden states. All that is written is symmetric. The initial memory need not be, and is kept apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "associative_problem.hpp"
#include "symmetric.hpp"

namespace fastweights {

constexpr int least_chunk = 16;  // steps

template <class T, int Bytes>
struct Sequence {
    using C = Columns<T, Bytes>;
    using R = Registers<T, Bytes>;
    using S = Symmetric<T, Bytes>;
    using V = typename C::V;

    // What the inner loop of one step leaves for the backward pass: h_0 .. h_{S-1}, and the layer norms.
    struct Trace {
        T *states, *normal, *inverse;
    };

    const Problem& problem;
    const Inputs<T>& in;
    const Shared<T>& shared;
    const int size, pitch, inner, longest;  // steps of a chunk, at most
    Arena arena;
    T *matrix, *stored, *z, *sum, *scratch;
    T* initial = nullptr;  // the rows of the initial memory, where there is one
    T *strengths = nullptr, *weights = nullptr;  // of every step, where they are given; and scratch for them
    const Episode* episode = nullptr;
    bool remembers = false;                // it begins with the initial memory
    std::int64_t length = 0, first = 0;    // steps; that at which the chunk at hand begins
    const T* start = nullptr;                   // the matrix before it, null as long as nothing has been formed

    static std::int64_t numbers(const Problem& p, const Inputs<T>& i, int longest) {
        const std::int64_t pitch = C::padded(p.size);
        return S::numbers(pitch) + pitch * ((i.memory ? p.size : 0) + longest + 3) + trace_numbers(p) +
               (i.strengths ? p.steps + longest : 0);
    }
    static std::int64_t trace_numbers(const Problem& p) {
        return (p.inner_steps + p.norms) * C::padded(p.size) + C::padded(p.norms);
    }

    // Vectors make it, whose code is for no level in particular.
    Sequence(const Problem& p, const Inputs<T>& i, const Shared<T>& s, int chunk = least_chunk, std::int64_t extra = 0)
        : problem(p), in(i), shared(s), size(p.size), pitch(C::padded(p.size)), inner(p.inner_steps), longest(chunk),
          arena((numbers(p, i, chunk) + extra) * sizeof(T)) {
        matrix = arena.template take<T>(S::numbers(pitch));
        stored = arena.template take_zeroed<T>((longest + std::int64_t(1)) * pitch);
        z = arena.template take<T>(pitch);
        sum = arena.template take<T>(pitch);
        scratch = arena.template take<T>(trace_numbers(p));
        if (in.memory) initial = arena.template take<T>(std::int64_t(size) * pitch);
        if (in.strengths == nullptr) return;
        strengths = arena.template take<T>(p.steps);
        weights = arena.template take<T>(longest);
    }

    // In the step's part of the trace of all, or in scratch where nobody wants it. A sequence's steps lie side by side.
    FASTWEIGHTS_INLINE Trace trace_of(std::int64_t t, T* trace) const {
        const std::int64_t step = episode->b * problem.steps + episode->begin + t;
        T* const states = trace ? trace + step * trace_numbers(problem) : scratch;
        T* const normal = states + inner * std::int64_t(pitch);
        return {states, normal, normal + problem.norms * std::int64_t(pitch)};
    }

    FASTWEIGHTS_INLINE void load_row(const T* source, T* row) const {
        if (size == 0) return;
        C::store(V{}, row + pitch - C::width);
        C::copy(source, size, row);
    }
    // Where the episode's step t lies in a [T,B] tensor, and in a [T,B,H] tensor.
    FASTWEIGHTS_INLINE std::int64_t place(std::int64_t t) const {
        return (episode->begin + t) * problem.batch + episode->b;
    }
    template <class Number>
    FASTWEIGHTS_INLINE Number* at(Number* tensor, std::int64_t t) const {
        return tensor + place(t) * size;
    }
    FASTWEIGHTS_INLINE void clear_after_end(T* target) const {
        for (std::int64_t t = length; t < episode->span; ++t) std::memset(at(target, t), 0, size * sizeof(T));
    }
    FASTWEIGHTS_INLINE bool clears(std::int64_t t) const { return in.clears && in.clears[place(t)]; }

    FASTWEIGHTS_INLINE V activate(V x) const {
        return problem.tanh ? R::tanh(x) : x < V{} ? V{} : x;  // in this order NaN stays NaN
    }

    // state <- f(LN(x)); keeps the normalised vector and one over the deviation.
    FASTWEIGHTS_OUTLINE void normalize_activate(const T* x, bool normalize, int slot, Trace trace, T* state) const {
        if (!normalize || in.gain == nullptr) {
            C::fill(pitch, state, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return activate(C::load(x + i)); });
            return;
        }
        const V mean = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(x + i); }) / T(size);
        const V variance = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V difference = C::load(x + i) - mean;
            return difference * difference;
        });
        const T inverse = T(1) / std::sqrt(variance[0] / T(size) + T(problem.eps));
        trace.inverse[slot] = inverse;
        T* const normal = trace.normal + slot * pitch;
        C::fill(pitch, normal, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return (C::load(x + i) - mean) * inverse; });
        C::fill(pitch, state, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return activate(C::load(normal + i) * C::load(shared.gain + i) + C::load(shared.shift + i));
        });
    }

    FASTWEIGHTS_OUTLINE void begin(const Episode& e) {
        episode = &e;
        length = e.length;
        first = 0;
        start = nullptr;
        remembers = in.memory && e.is_given();
        load_given(stored);
        for (std::int64_t i = 0; remembers && i < size; ++i)
            load_row(in.memory + (e.b * size + i) * size, initial + i * pitch);
        for (std::int64_t t = 0; strengths && t < length; ++t) strengths[t] = in.strengths[place(t)];
    }
    FASTWEIGHTS_INLINE void load_given(T* row) const {  // the hidden state with which the episode begins
        if (episode->is_given()) load_row(in.hidden + episode->b * size, row);
        else std::fill(row, row + pitch, T(0));
    }

    // What the chunk's hidden states weigh when the k-th has just been written: [-n] is for the n-th.
    FASTWEIGHTS_INLINE const T* weigh(int k) const {
        if (strengths == nullptr) return shared.power + k;
        for (int n = 0; n <= k; ++n) weights[k - n] = shared.power[k - n] * strengths[first + n];
        return weights + k;
    }

    // y += A x after the k-th hidden state of the chunk has been written, but for what is left of the initial memory.
    FASTWEIGHTS_INLINE void read(int k, const T* x, T* y) const {
        if (start) S::multiply(start, x, pitch, shared.kept[k], y);
        C::attend(stored, weigh(k), k + 1, x, pitch, y);
    }

    // The chunk's step k, with the drive and W h in z, to the next hidden state.
    FASTWEIGHTS_INLINE void step(int k, Trace trace, T* next) {
        normalize_activate(z, problem.normalize_initial, inner, trace, trace.states);
        for (int s = 0; s < inner; ++s) {
            const T* const state = trace.states + s * pitch;
            C::copy(z, pitch, sum);
            read(k, state, sum);
            if (remembers) C::multiply_rows(initial, state, size, pitch, shared.kept[first + k], sum);
            normalize_activate(sum, true, s, trace, s + 1 < inner ? trace.states + (s + 1) * pitch : next);
        }
    }

    FASTWEIGHTS_INLINE void forward_step(std::int64_t t, const Results<T>& out) {
        const int k = static_cast<int>(t - first);
        if (t + 1 < length) {
            C::prefetch(at(in.drive, t + 1), size);
            C::prefetch(at(out.outputs, t + 1), size);
        }
        T* const next = stored + (k + 1) * pitch;
        step(k, trace_of(t, out.trace), next);
        C::copy(next, size, at(out.outputs, t));
        if (k + 1 < longest) return;
        form(longest);
        C::copy(next, pitch, stored);
    }

    // Ends the chunk after `count` steps.
    FASTWEIGHTS_OUTLINE void form(int count) {
        if (start == nullptr) std::fill(matrix, matrix + S::numbers(pitch), T(0));
        if (count > 0) S::accumulate(matrix, shared.kept[count - 1], weigh(count - 1), stored, count, pitch);
        start = matrix;
        first += count;
    }

    FASTWEIGHTS_OUTLINE void end(const Results<T>& out) {
        clear_after_end(out.outputs);
        if (out.final == nullptr || !episode->is_last(problem.steps)) return;
        const std::int64_t whole = std::int64_t(size) * size;
        const T* const before = remembers ? in.memory + episode->b * whole : nullptr;
        const T left = length == 0 ? T(1) : shared.kept[length - 1];
        T* const final = out.final + episode->b * whole;
        if (start == nullptr) {
            const int count = static_cast<int>(length);
            const T* const weight = count == 0 ? nullptr : weigh(count - 1);
            for (std::int64_t i = 0; i < size; ++i)
                final_row(i, count, weight, left, before ? before + i * size : nullptr, final + i * size);
            return;
        }
        form(static_cast<int>(length - first));
        S::expand(matrix, size, final);
        for (std::int64_t i = 0; before && i < whole; ++i) final[i] += left * before[i];
    }

    // Row i of the final memory after `count` steps that were all of one chunk: no matrix needs to be formed.
    FASTWEIGHTS_OUTLINE void final_row(int i, int count, const T* weight, T left, const T* before, T* row) const {
        R::for_blocks(size, [&](int j, int some) FASTWEIGHTS_INLINE_LAMBDA {
            V sum = {};
            if (before) std::memcpy(&sum, before + j, some * sizeof(T));
            sum *= left;
            for (int n = 0; n < count; ++n) {
                const T* const h = stored + n * pitch;
                sum += C::load(h + j) * (weight[-n] * h[i]);
            }
            std::memcpy(row + j, &sum, some * sizeof(T));
        });
    }
};

// Episodes that take their steps together, so that a slow weight is loaded once for all of them. Where the slow weights
// and a fast matrix fit into the nearest cache side by side, a sequence alone is faster.
template <class T, int Bytes, class Member>
struct Team {
    using C = Columns<T, Bytes>;
    std::vector<Member> members;
    const T* from[most_in_team];
    T* to[most_in_team];
    int active = 0;  // of `from` and `to`: the members whose vectors are to be multiplied

    Team(const Problem& p, const Inputs<T>& in, const Shared<T>& s, int count) {
        members.reserve(count);
        for (int n = 0; n < count; ++n) members.emplace_back(p, in, s);
    }

    FASTWEIGHTS_INLINE void add(const T* x, T* y) {
        from[active] = x;
        to[active++] = y;
    }
    FASTWEIGHTS_INLINE void multiply(const T* weight) {
        C::multiply_each(weight, from, active, members[0].size, members[0].pitch, to);
        active = 0;
    }

    // visit(member) for those of the first `count` that have a step t.
    template <class Visit>
    FASTWEIGHTS_INLINE void each(int count, std::int64_t t, Visit visit) {
        for (int n = 0; n < count; ++n)
            if (t < members[n].length) visit(members[n]);
    }

    FASTWEIGHTS_INLINE void forward(const Episode* episodes, int count, const Results<T>& out) {
        std::int64_t most = 0;
        for (int n = 0; n < count; ++n) {
            members[n].begin(episodes[n]);
            most = std::max(most, members[n].length);
        }
        for (std::int64_t t = 0; t < most; ++t) {
            each(count, t, [&](Member& m) FASTWEIGHTS_INLINE_LAMBDA {
                m.load_row(m.at(m.in.drive, t), m.z);
                if (!m.clears(t)) add(m.stored + (t - m.first) * m.pitch, m.z);
            });
            multiply(members[0].shared.weight);
            each(count, t, [&](Member& m) FASTWEIGHTS_INLINE_LAMBDA { m.forward_step(t, out); });
        }
        for (int n = 0; n < count; ++n) members[n].end(out);
    }
};

template <class T>
int team_size(const Problem& p) {
    const std::int64_t weight_bytes = p.size * p.size * sizeof(T);
    return weight_bytes > 24 << 10 && p.batch >= 2 * most_in_team ? most_in_team : 1;
}

}  // namespace fastweights

// The backward pass of the matrix form, from the outputs and what the forward pass left in the trace.
//
// The fast matrix is kept at the beginning of every chunk of steps, never at every step. Since what is written is
// symmetric, the gradient is read through the same matrices as the states.
#pragma once

#include "associative_matrix.hpp"

namespace fastweights {

template <class T, int Bytes>
struct BackwardSequence : Sequence<T, Bytes> {
    using Base = Sequence<T, Bytes>;
    using C = typename Base::C;
    using S = typename Base::S;
    using Trace = typename Base::Trace;
    using Base::arena, Base::at, Base::episode, Base::first, Base::in, Base::initial, Base::inner, Base::length,
        Base::longest, Base::pitch, Base::problem, Base::remembers, Base::shared, Base::size, Base::start, Base::stored,
        Base::strengths;

    int count = 0;  // steps of the chunk at hand
    T *starts, *carried, *grad_z, *grad, *grad_u, *grad_hidden, *written;
    T* carried_initial = nullptr;

    // Steps of a chunk: about the root of their number, so that the matrices kept are no more than that either.
    static int chunk_steps(std::int64_t steps) {
        int chunk = least_chunk;
        while (std::int64_t(chunk) * chunk < steps) chunk += 8;
        return chunk;
    }
    static std::int64_t numbers(const Problem& p, bool memory) {
        const std::int64_t pitch = C::padded(p.size), chunk = chunk_steps(p.steps);
        const std::int64_t matrices = (p.steps + chunk - 1) / chunk + 1;
        return matrices * S::numbers(pitch) + pitch * ((memory ? p.size : 0) + chunk + 4);
    }

    BackwardSequence(const Problem& p, const Inputs<T>& i, const Shared<T>& s)
        : Base(p, i, s, chunk_steps(p.steps), numbers(p, i.memory != nullptr)) {
        starts = arena.template take<T>((p.steps + longest - 1) / longest * S::numbers(pitch));
        carried = arena.template take<T>(S::numbers(pitch));
        if (in.memory) carried_initial = arena.template take<T>(std::int64_t(size) * pitch);
        grad_z = arena.template take_zeroed<T>(longest * pitch);
        for (T** const vector : {&grad, &grad_u, &grad_hidden, &written}) *vector = arena.template take_zeroed<T>(pitch);
    }

    FASTWEIGHTS_OUTLINE void begin(const Episode& e, const T* outputs) {
        Base::begin(e);
        std::fill(carried, carried + S::numbers(pitch), T(0));
        std::fill(grad_hidden, grad_hidden + pitch, T(0));
        if (remembers) std::fill(carried_initial, carried_initial + std::int64_t(size) * pitch, T(0));
        keep_starts(outputs);
    }

    FASTWEIGHTS_OUTLINE void open(std::int64_t chunk, const T* outputs) {
        first = chunk * longest;
        count = static_cast<int>(std::clamp<std::int64_t>(length - first, 0, longest));
        if (count == 0) return;
        start = chunk == 0 ? nullptr : starts + (chunk - 1) * S::numbers(pitch);
        load_stored(outputs);
    }

    // `partial` gathers the gradients of the slow weights: W [H][pitch], then gain [pitch] and shift [pitch].
    FASTWEIGHTS_OUTLINE void close(T* partial) {
        for (int k = 0; k < count; ++k)  // what W did not see has no part in its gradient
            if (this->clears(first + k)) std::fill(stored + k * pitch, stored + (k + 1) * pitch, T(0));
        if (count > 0) C::accumulate(partial, grad_z, stored, count, size, pitch);
    }

    FASTWEIGHTS_OUTLINE void end(const Gradients<T>& out) const {
        this->clear_after_end(out.drive);
        for (std::int64_t t = length; strengths && t < episode->span; ++t) out.strengths[this->place(t)] = T(0);
        if (episode->is_given()) std::memcpy(out.hidden + episode->b * size, grad_hidden, size * sizeof(T));
        if (!remembers) return;
        T* const memory = out.memory + episode->b * size * size;
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j)
                memory[i * size + j] = T(problem.decay) * carried_initial[std::int64_t(i) * pitch + j];
    }

    FASTWEIGHTS_OUTLINE void load_stored(const T* outputs) {
        for (int k = 0; k <= count; ++k)
            if (first + k == 0) this->load_given(stored);
            else this->load_row(at(outputs, first + k - 1), stored + k * pitch);
    }

    // starts[c]: all that was written before chunk c + 1.
    FASTWEIGHTS_OUTLINE void keep_starts(const T* outputs) {
        const std::int64_t whole = S::numbers(pitch);
        count = longest;
        for (first = 0; first + longest < length; first += longest) {
            load_stored(outputs);
            T* const next = starts + first / longest * whole;
            if (first == 0) std::fill(next, next + whole, T(0));
            else std::copy(next - whole, next, next);
            S::accumulate(next, shared.kept[longest - 1], this->weigh(longest - 1), stored, longest, pitch);
        }
    }

    // From dL/dh(t+1) to dL/dz, which goes to grad_z[k], and dL/dh(t) but for W^T dL/dz, t = first + k.
    FASTWEIGHTS_INLINE void backward_step(int k, T* traces, const T* grad_outputs, const Gradients<T>& out,
                                          T* partial) {
        const std::int64_t t = first + k;
        if (t > 0) {
            C::prefetch(at(grad_outputs, t - 1), size);
            C::prefetch(at(out.drive, t - 1), size);
        }
        const Trace trace = this->trace_of(t, traces);
        T* const gz = grad_z + k * pitch;
        const T* const h = stored + k * pitch;
        this->load_row(at(grad_outputs, t), grad);
        add(grad_hidden, grad);
        std::fill(gz, gz + pitch, T(0));
        for (int s = inner - 1; s >= 0; --s) {
            const T* const state = trace.states + s * pitch;
            undo_activation(s + 1 < inner ? state + pitch : h + pitch, true, s, trace, partial);
            add(grad_u, gz);
            // `carried` is G + G^T for G = dL/dA(t): A is written as rate h h^T, so that dL/dh(t) = rate (G + G^T) h.
            std::fill(written, written + pitch, T(0));
            const T keep = s == inner - 1 ? T(problem.decay) : T(1);
            S::write_both_read(carried, keep, grad_u, state, h, pitch, written);
            if (remembers) C::write(carried_initial, keep, state, grad_u, size, pitch);  // its rows: dL/dA itself
            std::fill(grad, grad + pitch, T(0));
            this->read(k, grad_u, grad);
            // The rows of the initial memory, taken as columns, are its transpose.
            if (remembers) C::multiply(initial, grad_u, size, pitch, shared.kept[t], grad);
        }
        undo_activation(trace.states, problem.normalize_initial, inner, trace, partial);
        add(grad_u, gz);
        T rate = T(problem.rate);
        if (strengths) {
            const auto twice = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
                return C::load(written + i) * C::load(h + i);
            });
            out.strengths[this->place(t)] = rate / 2 * twice[0];
            rate *= strengths[t];
        }
        C::fill(pitch, grad_hidden, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(written + i) * rate; });
        C::copy(gz, size, at(out.drive, t));
    }

    FASTWEIGHTS_INLINE void add(const T* x, T* y) {
        C::fill(pitch, y, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(y + i) + C::load(x + i); });
    }

    // grad_u <- gradient of x from `grad`, that of state = f(LN(x)).
    FASTWEIGHTS_INLINE void undo_activation(const T* state, bool normalize, int slot, Trace trace, T* partial) {
        C::fill(pitch, grad_u, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const auto f = C::load(state + i), g = C::load(grad + i);
            using V = typename C::V;
            return problem.tanh ? g * (T(1) - f * f) : f <= V{} ? V{} : g;
        });
        if (!normalize || in.gain == nullptr) return;
        const T* const normal = trace.normal + slot * pitch;
        T* const gain = partial + std::int64_t(size) * pitch;
        T* const shift = gain + pitch;
        C::fill(pitch, gain, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(gain + i) + C::load(grad_u + i) * C::load(normal + i);
        });
        add(grad_u, shift);
        C::fill(pitch, grad_u, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(grad_u + i) * C::load(shared.gain + i);
        });
        const auto mean = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(grad_u + i); }) / T(size);
        const auto along = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(grad_u + i) * C::load(normal + i);
        }) / T(size);
        const T inverse = trace.inverse[slot];
        // The padding's gradient stays zero: it is multiplied with other paddings, but also carried on.
        C::fill(pitch, grad_u, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return (C::load(grad_u + i) - mean - along * C::load(normal + i)) * inverse;
        });
        std::fill(grad_u + size, grad_u + pitch, T(0));
    }
};

template <class T, int Bytes>
struct BackwardTeam : Team<T, Bytes, BackwardSequence<T, Bytes>> {
    using Member = BackwardSequence<T, Bytes>;
    using Base = Team<T, Bytes, Member>;
    using Base::Base, Base::members;

    FASTWEIGHTS_INLINE void backward(const Episode* episodes, int count, const Results<T>& from, const T* grad_outputs,
                                     const Gradients<T>& out, T* partial) {
        std::int64_t most = 0;
        for (int n = 0; n < count; ++n) {
            members[n].begin(episodes[n], from.outputs);
            most = std::max(most, members[n].length);
        }
        const std::int64_t longest = members[0].longest;
        for (std::int64_t chunk = (most + longest - 1) / longest - 1; chunk >= 0; --chunk) {
            for (int n = 0; n < count; ++n) members[n].open(chunk, from.outputs);
            for (int k = longest - 1; k >= 0; --k) {
                this->each(count, chunk * longest + k, [&](Member& m) FASTWEIGHTS_INLINE_LAMBDA {
                    m.backward_step(k, from.trace, grad_outputs, out, partial);
                    if (!m.clears(m.first + k)) this->add(m.grad_z + k * m.pitch, m.grad_hidden);
                });
                this->multiply(members[0].shared.weight_transposed);
            }
            for (int n = 0; n < count; ++n) members[n].close(partial);
        }
        for (int n = 0; n < count; ++n) members[n].end(out);
    }
};

}  // namespace fastweights

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
    using Base::arena, Base::at, Base::b, Base::first, Base::in, Base::initial, Base::inner, Base::length, Base::longest,
        Base::pitch, Base::problem, Base::shared, Base::size, Base::start, Base::stored;

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

    FASTWEIGHTS_INLINE BackwardSequence(const Problem& p, const Inputs<T>& i, const Shared<T>& s)
        : Base(p, i, s, chunk_steps(p.steps), numbers(p, i.memory != nullptr)) {
        starts = arena.template take<T>((p.steps + longest - 1) / longest * S::numbers(pitch));
        carried = arena.template take<T>(S::numbers(pitch));
        if (in.memory) carried_initial = arena.template take<T>(std::int64_t(size) * pitch);
        grad_z = arena.template take_zeroed<T>(longest * pitch);
        for (T** const vector : {&grad, &grad_u, &grad_hidden, &written}) *vector = arena.template take_zeroed<T>(pitch);
    }

    FASTWEIGHTS_INLINE void begin(std::int64_t index, const T* outputs) {
        Base::begin(index);
        std::fill(carried, carried + S::numbers(pitch), T(0));
        std::fill(grad_hidden, grad_hidden + pitch, T(0));
        if (in.memory) std::fill(carried_initial, carried_initial + std::int64_t(size) * pitch, T(0));
        keep_starts(outputs);
    }

    FASTWEIGHTS_INLINE void open(std::int64_t chunk, const T* outputs) {
        first = chunk * longest;
        count = static_cast<int>(std::clamp<std::int64_t>(length - first, 0, longest));
        if (count == 0) return;
        start = chunk == 0 ? nullptr : starts + (chunk - 1) * S::numbers(pitch);
        load_stored(outputs);
    }

    // `partial` gathers the gradients of the slow weights: W [H][pitch], then gain [pitch] and shift [pitch].
    FASTWEIGHTS_INLINE void close(T* partial) {
        if (count > 0) C::accumulate(partial, grad_z, stored, count, size, pitch);
    }

    FASTWEIGHTS_INLINE void end(const Gradients<T>& out) const {
        for (std::int64_t t = length; t < problem.steps; ++t) std::memset(at(out.drive, t), 0, size * sizeof(T));
        std::memcpy(out.hidden + b * size, grad_hidden, size * sizeof(T));
        if (in.memory == nullptr) return;
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j)
                out.memory[(b * size + i) * size + j] = T(problem.decay) * carried_initial[std::int64_t(i) * pitch + j];
    }

    FASTWEIGHTS_INLINE void load_stored(const T* outputs) {
        for (int k = 0; k <= count; ++k)
            this->load_row(first + k == 0 ? in.hidden + b * size : at(outputs, first + k - 1), stored + k * pitch);
    }

    // starts[c]: all that was written before chunk c + 1.
    FASTWEIGHTS_INLINE void keep_starts(const T* outputs) {
        const std::int64_t whole = S::numbers(pitch);
        count = longest;
        for (first = 0; first + longest < length; first += longest) {
            load_stored(outputs);
            T* const next = starts + first / longest * whole;
            if (first == 0) std::fill(next, next + whole, T(0));
            else std::copy(next - whole, next, next);
            S::accumulate(next, shared.kept[longest - 1], shared.power + longest - 1, stored, longest, pitch);
        }
    }

    // From dL/dh(t+1) to dL/dz, which goes to grad_z[k], and dL/dh(t) but for W^T dL/dz, t = first + k.
    FASTWEIGHTS_INLINE void backward_step(int k, T* traces, const T* grad_outputs, const Gradients<T>& out,
                                          T* partial) {
        const std::int64_t t = first + k;
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
            // `carried` is G + G^T for G = dL/dA(t): A is written as h h^T, so that dL/dh(t) = rate (G + G^T) h.
            std::fill(written, written + pitch, T(0));
            const T keep = s == inner - 1 ? T(problem.decay) : T(1);
            S::write_both_read(carried, keep, grad_u, state, h, pitch, written);
            if (in.memory) C::write(carried_initial, keep, state, grad_u, size, pitch);  // its rows: dL/dA itself
            std::fill(grad, grad + pitch, T(0));
            this->read(k, grad_u, grad);
            // The rows of the initial memory, taken as columns, are its transpose.
            if (in.memory) C::multiply(initial, grad_u, size, pitch, shared.kept[t], grad);
        }
        undo_activation(trace.states, problem.normalize_initial, inner, trace, partial);
        add(grad_u, gz);
        C::fill(pitch, grad_hidden, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(written + i) * T(problem.rate); });
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

    FASTWEIGHTS_INLINE void backward(std::int64_t first, int count, const Results<T>& from, const T* grad_outputs,
                                     const Gradients<T>& out, T* partial) {
        std::int64_t most = 0;
        for (int n = 0; n < count; ++n) {
            members[n].begin(first + n, from.outputs);
            most = std::max(most, members[n].length);
        }
        const std::int64_t longest = members[0].longest;
        for (std::int64_t chunk = (most + longest - 1) / longest - 1; chunk >= 0; --chunk) {
            for (int n = 0; n < count; ++n) members[n].open(chunk, from.outputs);
            for (int k = longest - 1; k >= 0; --k) {
                this->each(count, chunk * longest + k, [&](Member& m) FASTWEIGHTS_INLINE_LAMBDA {
                    m.backward_step(k, from.trace, grad_outputs, out, partial);
                    this->add(m.grad_z + k * m.pitch, m.grad_hidden);
                });
                this->multiply(members[0].shared.weight_transposed);
            }
            for (int n = 0; n < count; ++n) members[n].close(partial);
        }
        for (int n = 0; n < count; ++n) members[n].end(out);
    }
};

}  // namespace fastweights

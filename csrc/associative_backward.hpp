// The backward pass of one chunk, from the outputs and what the forward pass left in the trace.
#pragma once

#include "associative_chunk.hpp"

namespace fastweights {

template <class T, int Bytes>
struct BackwardChunk : Chunk<T, Bytes> {
    using Base = Chunk<T, Bytes>;
    using L = typename Base::L;
    using Row = typename Base::Row;
    using Trace = typename Base::Trace;
    using Base::arena, Base::in, Base::inner, Base::problem, Base::shared, Base::size, Base::steps, Base::stored,
        Base::stride, Base::u, Base::weights;

    Row *grad_stored, *grad_z, *products, *grad, *grad_u, *grad_gain, *grad_shift;
    Row *read_grads = nullptr, *read_states = nullptr;  // what every read of the initial memory was, for its gradient

    static std::int64_t rows(const Problem& p, bool memory) {
        const std::int64_t stride = Base::padded(p.size), reads = p.steps * p.inner_steps;
        return (p.steps + 1) * (stride + 1) + p.steps * stride + 4 * stride + (memory ? reads * (2 * stride + 1) : 0);
    }

    FASTWEIGHTS_INLINE BackwardChunk(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index)
        : Base(p, i, s, index, rows(p, i.memory != nullptr)) {
        products = arena.template take<Row>(p.steps + 1);
        grad = arena.template take<Row>(stride);
        grad_u = arena.template take<Row>(stride);
        grad_stored = arena.template take_zeroed<Row>((p.steps + 1) * stride);
        grad_z = arena.template take_zeroed<Row>(p.steps * stride);
        grad_gain = arena.template take_zeroed<Row>(stride);
        grad_shift = arena.template take_zeroed<Row>(stride);
        if (in.memory == nullptr) return;
        read_grads = arena.template take<Row>(p.steps * inner * stride);
        read_states = arena.template take<Row>(p.steps * inner * stride);
    }

    // `partial` gathers the gradients of the slow weights: W [H,H], then gain [H] and shift [H].
    FASTWEIGHTS_INLINE void backward(const Results<T>& from, const T* grad_outputs, const Gradients<T>& out,
                                     T* partial) {
        for (int t = 0; t < steps; ++t) this->gather_step(from.outputs, t, stored + (t + 1) * stride);
        for (int t = steps - 1; t >= 0; --t) {
            backward_step(t, this->trace_of(t, from.trace, nullptr), grad_outputs);
            this->scatter_step(grad_z + t * stride, t, out.drive);
            L::multiply(shared.weight_transposed, size, size, grad_z + t * stride, grad_stored + t * stride);
        }
        this->clear_after_end(out.drive);
        this->scatter_batch(grad_stored, out.hidden, size);
        L::outer(grad_z, stored, steps, stride, size, partial);
        if (in.gain) {
            T* const gain = partial + std::int64_t(size) * size;
            for (int i = 0; i < size; ++i) {
                gain[i] += grad_gain[i].sum();
                gain[size + i] += grad_shift[i].sum();
            }
        }
        if (in.memory) write_memory_gradient(out.memory);
    }

    FASTWEIGHTS_INLINE void backward_step(int t, Trace trace, const T* grad_outputs) {
        Row* const gz = grad_z + t * stride;
        this->gather_step(grad_outputs, t, grad);
        add(grad_stored + (t + 1) * stride, grad);
        this->mask(t, grad);  // h(t+1) of a sequence that has ended is a constant
        for (int s = inner - 1; s >= 0; --s) {
            const Row* const state = trace.states + s * stride;
            undo_activation(grad, s + 1 < inner ? state + stride : stored + (t + 1) * stride, true, s, trace);
            this->mask(t, grad_u);
            add(grad_u, gz);
            // A(t) v = sum c_n h(n) (h(n) . v): the gradients of h(n), as key and as value, and of v.
            std::fill(grad, grad + size, Row{});
            L::dot(stored, t + 1, stride, size, state, weights);
            this->weigh(weights, t, weights);
            L::dot(stored, t + 1, stride, size, grad_u, products);
            this->weigh(products, t, products);
            L::add_outer(weights, grad_u, products, state, t + 1, stride, size, grad_stored);
            L::mix(stored, t + 1, stride, size, products, grad);
            if (in.memory) backward_read(t, s, state);
        }
        undo_activation(grad, trace.states, problem.normalize_initial, inner, trace);
        add(grad_u, gz);
        this->mask(t, gz);
    }

    FASTWEIGHTS_INLINE void backward_read(int t, int s, const Row* state) {
        const T kept = shared.kept[t];
        Row* const scaled = read_grads + (std::int64_t(t) * inner + s) * stride;
        for (int i = 0; i < size; ++i) scaled[i] = grad_u[i] * kept;
        std::copy(state, state + size, read_states + (std::int64_t(t) * inner + s) * stride);
        L::mix(this->memory, size, stride, size, scaled, grad);
    }

    FASTWEIGHTS_INLINE void write_memory_gradient(T* target) {
        const int reads = steps * inner;
        Row* const column = arena.template take<Row>(problem.steps * inner);
        for (int i = 0; i < size; ++i) {
            for (int n = 0; n < reads; ++n) column[n] = read_grads[std::int64_t(n) * stride + i];
            std::fill(u, u + size, Row{});
            L::mix(read_states, reads, stride, size, column, u);
            this->scatter_batch(u, target, std::int64_t(size) * size, std::int64_t(i) * size);
        }
    }

    FASTWEIGHTS_INLINE void add(const Row* x, Row* y) {
        for (int i = 0; i < size; ++i) y[i] += x[i];
    }

    // grad_u <- gradient of x from that of state = f(LN(x)).
    FASTWEIGHTS_INLINE void undo_activation(const Row* gradient, const Row* state, bool normalize, int slot,
                                            Trace trace) {
        for (int i = 0; i < size; ++i) grad_u[i] = this->slope(state[i], gradient[i]);
        if (!normalize || in.gain == nullptr) return;
        const Row* const normal = trace.normal + slot * stride;
        for (int i = 0; i < size; ++i) {
            grad_gain[i] += grad_u[i] * normal[i];
            grad_shift[i] += grad_u[i];
            grad_u[i] = grad_u[i] * in.gain[i];
        }
        const T share = T(1) / T(size);
        const Row mean = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return grad_u[i]; }) * share;
        const Row along =
            L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return grad_u[i] * normal[i]; }) * share;
        const Row inverse = trace.deviation[slot];
        for (int i = 0; i < size; ++i) grad_u[i] = inverse * (grad_u[i] - mean - along * normal[i]);
    }
};

}  // namespace fastweights

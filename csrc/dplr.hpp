// The delta family where a step changes the state by a matrix that is diagonal plus one of rank one:
//
//     S <- diag(d_i) S + k_i v_i^T + b_i u_i^T,   u_i = S^T a_i of the state before
//
// In delta.hpp's names, U holds the u_i, and within a chunk
//
//     (I - B) U = A V + d' a S,   A_ij = a_i.(exp(G_{i-1} - G_j) k_j) for j < i, and B the same of b_j
//     O = scale (d Q S + P V + R U),   P_ij = q_i.(exp(G_i - G_j) k_j) for j <= i, and R the same of b_j
//     S <- d_last S + (w K)^T V + (w b)^T U
//
// d' is d of the step before: a reads before the decay of its own step, as q of the step before does after its own.
#pragma once

#include "delta_backward.hpp"

namespace fastweights {

template <class T, int Bytes>
FASTWEIGHTS_OUTLINE void DeltaHead<T, Bytes>::prepare_dplr(std::int64_t t, int count) {
    load_key_rows(t, count);
    load_rows(in.a, keys, t, count, a, key_pitch);
    load_rows(in.b, keys, t, count, b, key_pitch);
    load_rows(in.v, values, t, count, value, value_pitch);
    std::fill_n(a + count * key_pitch, key_pitch, T(0));  // what no step of this part reads
    C::transpose(k, key_pitch, count, keys, k_columns, step_pitch);
    C::transpose(b, key_pitch, count, keys, b_columns, step_pitch);
    load_factors(t, count);
    std::copy_n(a, key_pitch, kept_a);
    for (std::int64_t c = key_pitch; c < count * key_pitch; ++c) kept_a[c] = kept_rows[c - key_pitch] * a[c];
    Pairs::multiply(dplr_steps_of(count, k), k_columns, attention, overlap + step_pitch, step_pitch);
    Pairs::multiply(dplr_steps_of(count, b), b_columns, b_attention, b_overlap + step_pitch, step_pitch);
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < i; ++j) mixing[i * step_pitch + j] = -b_overlap[i * step_pitch + j];
    product(count, values, keys, kept_a, key_pitch, 1, state, written);
    lower(count, values, overlap, value, value_pitch, written, value_pitch);
    M::run({P::solve, count, padded(values), 0, mixing, step_pitch, 1, nullptr, 0, written, value_pitch, true});
}

template <class T, int Bytes>
FASTWEIGHTS_OUTLINE void DeltaBackwardHead<T, Bytes>::backward_dplr_part(std::int64_t t, int count, const T* grad_outputs,
                                                                         const DeltaGradients<T>& to) {
    const int last = count - 1, wide = padded(keys);
    this->prepare_dplr(t, count);
    this->load_rows(grad_outputs, values, t, count, out, value_pitch);
    this->scale_all(out, count, value_pitch, T(p.scale));
    C::transpose(k_columns, step_pitch, keys, count, scaled, key_pitch);
    C::transpose(b_columns, step_pitch, keys, count, b_scaled, key_pitch);
    C::transpose(state, value_pitch, keys, values, state_rows, key_pitch);
    C::transpose(grad_state, value_pitch, keys, values, grad_state_rows, key_pitch);
    C::transpose(written, value_pitch, count, values, written_columns, step_pitch);
    C::transpose(value, value_pitch, count, values, value_columns, step_pitch);

    // Of U, of what it is solved from, and of V.
    product(count, values, keys, b_scaled, key_pitch, 1, grad_state, grad_written);
    lower_transposed(count, values, b_attention, out, value_pitch, grad_written, value_pitch);
    solve_transposed(count);
    product(count, values, keys, scaled, key_pitch, 1, grad_state, grad_value);
    lower_transposed(count, values, attention, out, value_pitch, grad_value, value_pitch);
    lower_transposed(count, values, overlap, grad_written, value_pitch, grad_value, value_pitch);

    // Of d Q and d' a, by what is read of the state; of w K and w b, by what is written into it.
    product(count, keys, values, out, value_pitch, 1, state_rows, key_pitch, grad_q, key_pitch);
    product(count, keys, values, grad_written, value_pitch, 1, state_rows, key_pitch, grad_kept_a, key_pitch);
    product(count, keys, values, value, value_pitch, 1, grad_state_rows, key_pitch, grad_k, key_pitch);
    product(count, keys, values, written, value_pitch, 1, grad_state_rows, key_pitch, grad_b, key_pitch);

    // Of P, R, A and B.
    this->pair(count, values, out, value_pitch, value_columns, grad_pairs);
    this->pair(count, values, out, value_pitch, written_columns, grad_b_pairs);
    this->pair(count, values, grad_written, value_pitch, value_columns, grad_overlap);
    this->pair(count, values, grad_written, value_pitch, written_columns, grad_b_overlap);
    for (T* pairs : {grad_pairs, grad_b_pairs, grad_overlap, grad_b_overlap})
        std::fill(pairs + count * step_pitch, pairs + delta_chunk * step_pitch, T(0));

    // Of the state before.
    T *const of_state = sums, *const before = sums + key_pitch, *const after = sums + 2 * key_pitch;
    differentiate_state(count, of_state);
    product(keys, values, count, kept_a, 1, key_pitch, grad_written, grad_state, true);

    // Of the decays, as in differentiate_channels: a sum over what each weakens.
    std::fill_n(before, wide, T(0));
    for (int i = 0; i < count; ++i)
        for (int c = 0; c < wide; ++c) {
            const std::int64_t place = i * key_pitch + c;
            grad_g[place] = of_state[c] + before[c];
            before[c] += scaled[place] * grad_k[place] + b_scaled[place] * grad_b[place];
        }
    T* const left_rows = before;
    std::fill_n(left_rows, wide, T(1));
    std::fill_n(after, wide, T(0));
    for (int i = last; i >= 0; --i)
        for (int c = 0; c < wide; ++c) {
            const std::int64_t place = i * key_pitch + c;
            grad_g[place] += after[c] += kept_q[place] * grad_q[place];
            after[c] += kept_a[place] * grad_kept_a[place];  // what a reads, the decays of the steps before weaken
            grad_q[place] *= kept_rows[place];
            grad_a[place] = i ? kept_rows[place - key_pitch] * grad_kept_a[place] : grad_kept_a[place];
            grad_k[place] *= left_rows[c];
            grad_b[place] *= left_rows[c];
            left_rows[c] *= factors[place];
        }
    T* const next_a = grad_a + key_pitch;
    Pairs::differentiate(this->dplr_steps_of(count, k), grad_pairs, grad_overlap + step_pitch, step_pitch, room,
                         {grad_q, next_a, grad_k, true}, grad_g);
    Pairs::differentiate(this->dplr_steps_of(count, b), grad_b_pairs, grad_b_overlap + step_pitch, step_pitch, room,
                         {grad_q, next_a, grad_b, true}, grad_g);

    store_decays(t, count, to);
    this->store_rows(grad_q, key_pitch, count, keys, to.q, t);
    this->store_rows(grad_k, key_pitch, count, keys, to.k, t);
    this->store_rows(grad_a, key_pitch, count, keys, to.a, t);
    this->store_rows(grad_b, key_pitch, count, keys, to.b, t);
    this->store_rows(grad_value, value_pitch, count, values, to.v, t);
}

// One step: the state is read for u, then changed and read for the output as it passes.
template <class T, int Bytes>
struct DplrStep {
    using C = Columns<T, Bytes>;
    using V = typename C::V;
    static constexpr int width = C::width;
    static constexpr int most = Bytes == 64 ? 8 : 4;

    static FASTWEIGHTS_OUTLINE void run(const DeltaProblem& p, const DeltaInputs<T>& in, std::int64_t place,
                                        const DeltaResults<T>& results) {
        const std::int64_t keys = p.keys, values = p.values;
        const T* const before = in.state ? in.state + place * keys * values : nullptr;
        T *const after = results.final + place * keys * values, *const out = results.outputs + place * values;
        if (in.lengths && in.lengths[place / p.heads] == 0) {
            std::fill_n(out, values, T(0));
            if (before) std::copy_n(before, keys * values, after);
            else std::fill_n(after, keys * values, T(0));
            return;
        }
        const T *const q = in.q + place * keys, *const k = in.k + place * keys, *const v = in.v + place * values;
        const T *const a = in.a + place * keys, *const b = in.b + place * keys, *const g = in.g + place * keys;
        const bool anew = !before || is_nothing(g, keys);
        Arena arena(C::padded(keys) * sizeof(T));
        T* const factors = arena.template take_zeroed<T>(C::padded(keys));
        C::copy(g, static_cast<int>(keys), factors);
        C::fill(static_cast<int>(C::padded(keys)), factors,
                [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return decay_of<C>(C::load(factors + i)); });

        const auto run_panel = [&](int j, auto block, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            constexpr int size = decltype(block)::value;
            const auto load = [&](const T* from, int c) FASTWEIGHTS_INLINE_LAMBDA {
                V x = {};
                std::memcpy(&x, from + j + c * width, count * sizeof(T));
                return x;
            };
            V read[size] = {}, value[size], sum[size] = {};
            if (!anew)
                for (std::int64_t i = 0; i < keys; ++i)
                    for (int c = 0; c < size; ++c) read[c] += load(before + i * values, c) * a[i];
            for (int c = 0; c < size; ++c) value[c] = load(v, c);
            // From the last row on, which the nearest cache still has.
            for (std::int64_t i = keys - 1; i >= 0; --i)
                for (int c = 0; c < size; ++c) {
                    V row = value[c] * k[i] + read[c] * b[i];
                    if (!anew) row += load(before + i * values, c) * factors[i];
                    sum[c] += row * q[i];
                    std::memcpy(after + i * values + j + c * width, &row, count * sizeof(T));
                }
            for (int c = 0; c < size; ++c) {
                sum[c] *= T(p.scale);
                std::memcpy(out + j + c * width, &sum[c], count * sizeof(T));
            }
        };
        C::template for_columns<most>(static_cast<int>(values), run_panel);
    }
};

}  // namespace fastweights

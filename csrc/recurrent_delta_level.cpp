// The recurrent delta rule at one level.
#include "recurrent_delta_backward.hpp"

namespace fastweights {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                      \
    TARGET void recurrent_delta_forward_##NAME(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in,        \
                                               std::int64_t from, std::int64_t end,                                      \
                                               const RecurrentDeltaResults<T>& out) {                                    \
        RecurrentDeltaTeam<T, BYTES>(p, in, from, end).forward(out);                                                     \
    }                                                                                                                    \
    TARGET void recurrent_delta_step_##NAME(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in,           \
                                            const RecurrentDeltaStep<T>& step, std::int64_t from, std::int64_t end,      \
                                            const RecurrentDeltaResults<T>& out) {                                       \
        using Team = RecurrentDeltaTeam<T, BYTES>;                                                                       \
        Team(p, in, from, end, Team::step_numbers_of(p)).step(step, out);                                                \
    }                                                                                                                    \
    TARGET void recurrent_delta_backward_##NAME(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in,       \
                                                std::int64_t from, std::int64_t end,                                     \
                                                const RecurrentDeltaResults<T>& kept, const T* grad_outputs,             \
                                                const T* grad_memory, const RecurrentDeltaGradients<T>& out) {           \
        RecurrentDeltaBackwardTeam<T, BYTES>(p, in, from, end).backward(kept, grad_outputs, grad_memory, out);           \
    }
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, double)

}  // namespace fastweights

// Checks that all ranks pass the same description (a model's parameters, a mesh) before anything is allocated or sent.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace tsr {

// What the ranks compare, for errors if some ranks call something else.
enum class Compared { models, buffers, meshes, tensors, pipelines, settings };

// `lines` describe this rank's request, each a text without NUL. Collective: sends 48 bytes per rank if all agree;
// otherwise every rank throws the same MISMATCH, with the first line in which the lowest differing rank differs from
// rank 0.
void check_same_on_all_ranks(Communicator& comm, Compared compared, const std::vector<std::string>& lines,
                             const std::string& what);

// Call instead of check_same_on_all_ranks on a rank whose request is invalid; throws `why`. The other ranks, which
// would otherwise wait until their deadline, throw an error with the same code that names the rank and the reason.
[[noreturn]] void refuse_on_all_ranks(Communicator& comm, Compared compared, const Error& why);

// All ranks know that the request of `rank` is invalid, with `code`, but not yet the reason: a text of `length` bytes,
// which on that rank is `own`. Collective, with `label` on every rank; throws the error on every rank.
[[noreturn]] void throw_refusal(Communicator& comm, std::string_view label, int rank, Code code, uint64_t length,
                                const std::string& own);

// Returns the result of `body`; if it throws, calls refuse_on_all_ranks.
template <class Body>
auto or_refuse_on_all_ranks(Communicator& comm, Compared compared, Body&& body) {
    try {
        return body();
    } catch (...) {
        refuse_on_all_ranks(comm, compared, current_error());
    }
}

}  // namespace tsr

// Do all ranks say the same? Asked before anything is allocated or sent by what they say: a model's parameters, a mesh.
#pragma once

#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace tsr {

// `lines` describe what this rank wants, each a text without NUL. Collective: 48 bytes a rank when all
// agree; otherwise every rank throws the same MISMATCH, which names the first line in which the lowest differing rank
// differs from rank 0.
void check_same_on_all_ranks(Communicator& comm, const std::vector<std::string>& lines, const std::string& what);

// Takes the place of check_same_on_all_ranks on a rank that wants nothing possible, and throws `why`. The others, which
// would wait for it until their deadline, throw an error of its code that names the rank and tells why.
[[noreturn]] void refuse_on_all_ranks(Communicator& comm, const Error& why);

// All ranks know that `rank` wants nothing possible, by `code`, and not yet why: a text of `length` bytes, which is its
// `own`. Collective.
[[noreturn]] void throw_refusal(Communicator& comm, int rank, Code code, uint64_t length, const std::string& own);

// What `body` returns; if it throws, nothing is possible.
template <class Body>
auto or_refuse_on_all_ranks(Communicator& comm, Body&& body) {
    try {
        return body();
    } catch (...) {
        refuse_on_all_ranks(comm, current_error());
    }
}

}  // namespace tsr

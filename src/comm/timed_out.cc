#include "comm/timed_out.hpp"

#include <fmt/core.h>

#include <algorithm>

namespace tsr {

namespace {

constexpr size_t most_named = 8;

}  // namespace

Error timed_out(int rank, const std::string& headline, milliseconds timeout, std::vector<Late> late) {
    std::stable_partition(late.begin(), late.end(), [](const Late& one) { return one.stopped; });
    std::string who;
    for (size_t i = 0; i < late.size() && i < most_named; ++i) {
        who += fmt::format("{}{} {}{}", i == 0 ? "" : "; ", late[i].name, late[i].where,
                           late[i].stopped ? "; the process is stopped" : "");
    }
    if (late.size() > most_named) who += fmt::format("; and {} more", late.size() - most_named);
    return Error(Code::timeout,
                 fmt::format(
                     "rank {}: {} timed out after {} s: {}. Check the log of rank {}, check that every rank makes this "
                     "call and all calls before it (saves included), or raise the timeout of the communicator",
                     rank, headline, static_cast<double>(timeout.count()) / 1000, who,
                     late.empty() ? rank : late[0].rank))
        .with_peer(late.empty() ? -1 : late[0].rank);
}

}  // namespace tsr

#include "comm/fingerprint.hpp"

#include <fmt/core.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <span>

namespace tsr {

namespace {

// What each rank announces about its text.
struct Entry {
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
    uint64_t length = 0;
    int64_t failed = 0;  // the error code, with the reason as the text; 0: the text is the rank's description

    friend bool operator==(const Entry&, const Entry&) = default;
};
static_assert(sizeof(Entry) == SHA256_DIGEST_LENGTH + 16);  // no padding, which would be compared

std::string joined(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) {
        text += line;
        text += '\0';
    }
    return text;
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> lines;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = text.find('\0', begin);
        lines.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return lines;
}

std::string_view label_of(Compared compared) {
    switch (compared) {
        case Compared::models: return "comparing the ranks' models";
        case Compared::buffers: return "comparing the ranks' buffers";
        case Compared::meshes: return "comparing the ranks' meshes";
        case Compared::tensors: return "comparing the ranks' tensors";
        case Compared::pipelines: return "comparing the ranks' pipelines";
        case Compared::settings: return "comparing the ranks' settings";
    }
    return "";
}

std::string broadcast_text(Communicator& comm, std::string_view label, const std::string& mine, int root,
                           uint64_t length) {
    std::string text = comm.rank() == root ? mine : std::string(length, '\0');
    const Tensor tensor = tensor_of(std::span<char>(text), DType::u8);
    comm.run({.collective = Collective::broadcast, .outputs = {&tensor, 1}, .peer = root, .label = label});
    return text;
}

std::string line_or_nothing(const std::vector<std::string>& lines, size_t i) {
    return i < lines.size() ? lines[i] : "nothing";
}

// `own` is this rank's text, or why it `failed`.
void compare(Communicator& comm, std::string_view label, const std::string& own, Code failed, const std::string& what) {
    Entry entry{{}, own.size(), static_cast<int64_t>(failed)};
    SHA256(reinterpret_cast<const unsigned char*>(own.data()), own.size(), entry.digest.data());
    std::vector<Entry> all(static_cast<size_t>(comm.world_size()));
    const auto bytes = [](std::span<Entry> entries) {
        return tensor_of(std::span(reinterpret_cast<uint8_t*>(entries.data()), entries.size_bytes()), DType::u8);
    };
    const Tensor input = bytes({&entry, 1});
    const Tensor output = bytes(all);
    comm.run({.collective = Collective::all_gather, .inputs = {&input, 1}, .outputs = {&output, 1}, .label = label});

    const auto number = [&](auto found) { return static_cast<int>(found - all.begin()); };
    const auto bad = std::ranges::find_if(all, [](const Entry& one) { return one.failed != 0; });
    if (bad != all.end()) {
        throw_refusal(comm, label, number(bad), static_cast<Code>(bad->failed), bad->length, own);
    }
    const auto other = std::ranges::find_if(all, [&](const Entry& one) { return one != all.front(); });
    if (other == all.end()) return;

    const auto zero_lines = split(broadcast_text(comm, label, own, 0, all.front().length));
    const auto other_lines = split(broadcast_text(comm, label, own, number(other), other->length));
    const size_t count = std::max(zero_lines.size(), other_lines.size());
    size_t first = 0;
    while (first + 1 < count && line_or_nothing(zero_lines, first) == line_or_nothing(other_lines, first)) ++first;
    throw Error(Code::mismatch,
                fmt::format("{}: rank {} has {}, rank 0 has {}; use the same on every rank", what, number(other),
                            line_or_nothing(other_lines, first), line_or_nothing(zero_lines, first)))
        .with_rank(comm.rank())
        .with_peer(number(other));
}

}  // namespace

void check_same_on_all_ranks(Communicator& comm, Compared compared, const std::vector<std::string>& lines,
                             const std::string& what) {
    compare(comm, label_of(compared), joined(lines), Code::ok, what);
}

void throw_refusal(Communicator& comm, std::string_view label, int rank, Code code, uint64_t length,
                   const std::string& own) {
    const std::string why = broadcast_text(comm, label, own, rank, length);
    throw Error(code, fmt::format("rank {}: {}", rank, why))
        .with_rank(rank)
        .with_peer(rank)
        .with_launcher_rank(comm.launcher_rank(rank))
        .with_launcher_peer(comm.launcher_rank(rank));
}

void refuse_on_all_ranks(Communicator& comm, Compared compared, const Error& why) {
    try {
        compare(comm, label_of(compared), why.what(), why.code(), {});
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): whatever the others say, this is why it ends here
    }
    throw why.with_rank(comm.rank()).with_launcher_rank(comm.launcher_rank(comm.rank()));
}

}  // namespace tsr

#include "comm/fingerprint.hpp"

#include <fmt/format.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace tsr {

namespace {

constexpr size_t digest_size = SHA256_DIGEST_LENGTH;
constexpr size_t entry_size = digest_size + sizeof(uint64_t);  // and the length of the joined text

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

uint64_t length_in(std::span<const uint8_t> entry) {
    uint64_t length = 0;
    std::memcpy(&length, entry.data() + digest_size, sizeof length);
    return length;
}

std::string broadcast_text(Communicator& comm, const std::string& mine, int root, uint64_t length) {
    std::string text = comm.rank() == root ? mine : std::string(length, '\0');
    const Tensor tensor = tensor_of(std::span<char>(text), DType::u8);
    comm.run({.collective = Collective::broadcast,
              .outputs = {&tensor, 1},
              .peer = root,
              .label = "comparison of the ranks"});
    return text;
}

std::string line_or_nothing(const std::vector<std::string>& lines, size_t i) {
    return i < lines.size() ? lines[i] : "nothing";
}

}  // namespace

void check_same_on_all_ranks(Communicator& comm, const std::vector<std::string>& lines, const std::string& what) {
    const std::string mine = joined(lines);
    std::array<uint8_t, entry_size> own{};
    SHA256(reinterpret_cast<const unsigned char*>(mine.data()), mine.size(), own.data());
    const uint64_t length = mine.size();
    std::memcpy(own.data() + digest_size, &length, sizeof length);

    const auto world_size = static_cast<size_t>(comm.world_size());
    std::vector<uint8_t> all(entry_size * world_size);
    const Tensor input = tensor_of(std::span<uint8_t>(own), DType::u8);
    const Tensor output = tensor_of(std::span<uint8_t>(all), DType::u8);
    comm.run({.collective = Collective::all_gather,
              .inputs = {&input, 1},
              .outputs = {&output, 1},
              .label = "comparison of the ranks"});

    const auto entry = [&](size_t rank) {
        return std::span<const uint8_t>(all).subspan(rank * entry_size, entry_size);
    };
    size_t other = 1;
    while (other < world_size && std::ranges::equal(entry(other), entry(0))) ++other;
    if (other >= world_size) return;

    const auto zero_lines = split(broadcast_text(comm, mine, 0, length_in(entry(0))));
    const auto other_lines = split(broadcast_text(comm, mine, static_cast<int>(other), length_in(entry(other))));
    const size_t count = std::max(zero_lines.size(), other_lines.size());
    size_t first = 0;
    while (first + 1 < count && line_or_nothing(zero_lines, first) == line_or_nothing(other_lines, first)) ++first;
    throw Error(Code::mismatch,
                fmt::format("{}: rank {} has {}, rank 0 has {}; make them the same on every rank", what, other,
                            line_or_nothing(other_lines, first), line_or_nothing(zero_lines, first)))
        .with_rank(comm.rank())
        .with_peer(static_cast<int>(other));
}

}  // namespace tsr

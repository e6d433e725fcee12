#include "comm/peers.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/cut_list.hpp"
#include "base/json.hpp"

namespace tsr {

namespace {

Tensor bytes_of(std::string& text) {
    return {reinterpret_cast<std::byte*>(text.data()), Dims{static_cast<int64_t>(text.size())}, DType::u8, {}};
}

std::string encode(const Error& error) {
    Json json;
    json.set("code", static_cast<int64_t>(error.code()));
    json.set("rank", int64_t{error.record()->rank});
    json.set("peer", int64_t{error.record()->peer});
    json.set("message", is_utf8(error.what()) ? std::string(error.what()) : "(the message is not UTF-8)");
    json.set("domain", static_cast<int64_t>(error.record()->native_domain));
    json.set("native", int64_t{error.record()->native_code});
    json.set("launcher_rank", int64_t{error.record()->launcher_rank});
    return json.dump();
}

// All ranks print to one terminal: only the rank that found the errors prints the complete list.
std::string shortened(const std::string& message, int rank) {
    constexpr int shown = 3;
    size_t end = message.find('\n');
    for (int line = 0; line < shown && end != std::string::npos; ++line) end = message.find('\n', end + 1);
    if (end == std::string::npos) return message;
    const auto left = std::count(message.begin() + static_cast<std::ptrdiff_t>(end), message.end(), '\n');
    if (left < 2) return message;
    return cut_list(message.substr(0, end), left, rank);
}

// The error of `rank`, or of the rank that its message names if it was passed on; worded for rank `own`.
Error decode(std::string_view text, int rank, int own, int world_size) {
    const Json json = Json::parse(text, "a rank's error");
    std::string message = json.at("message").as_string();
    const auto told_by = static_cast<int>(json.at("rank").as_int());
    if (message.starts_with(fmt::format("rank {}: ", told_by))) {
        rank = told_by;
    } else if (world_size > 1) {
        message = fmt::format("rank {}: {}", rank, message);
    }
    if (rank != own) message = shortened(message, rank);
    Error error(static_cast<Code>(json.at("code").as_int()), std::move(message));
    return error.with_rank(rank)
        .with_peer(static_cast<int>(json.at("peer").as_int()))
        .with_launcher_rank(static_cast<int>(json.at("launcher_rank").as_int()))
        .with_native(static_cast<NativeDomain>(json.at("domain").as_int()),
                     static_cast<int>(json.at("native").as_int()));
}

}  // namespace

std::string Peers::gather_fixed(std::string_view mine) {
    std::string in(mine);
    if (!comm_ || world_size() == 1) return in;
    std::string out(in.size() * static_cast<size_t>(world_size()), '\0');
    const Tensor input = bytes_of(in);
    const Tensor output = bytes_of(out);
    Request request;
    request.collective = Collective::all_gather;
    request.inputs = std::span(&input, 1);
    request.outputs = std::span(&output, 1);
    request.label = label_;
    comm_->run(request);
    return out;
}

std::vector<std::string> Peers::gather(std::string_view mine) {
    const auto count = static_cast<size_t>(world_size());
    const uint64_t size = mine.size();
    const std::string sizes_text = gather_fixed({reinterpret_cast<const char*>(&size), sizeof size});
    std::vector<uint64_t> sizes(count);
    std::memcpy(sizes.data(), sizes_text.data(), sizes_text.size());
    // Padded to the longest text: texts are short, and this needs only a fixed-size collective.
    const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
    std::vector<std::string> texts(count);
    if (longest == 0) return texts;
    std::string padded(mine);
    padded.resize(longest, '\0');
    const std::string all = gather_fixed(padded);
    for (size_t rank = 0; rank < count; ++rank) texts[rank] = all.substr(rank * longest, sizes[rank]);
    return texts;
}

std::string Peers::from_rank0(std::string_view mine) {
    std::string text(mine);
    if (!comm_ || world_size() == 1) return text;
    const auto broadcast = [&](std::string& bytes) {
        const Tensor tensor = bytes_of(bytes);
        Request request;
        request.collective = Collective::broadcast;
        request.outputs = std::span(&tensor, 1);
        request.peer = 0;
        request.label = "checkpoint";
        comm_->run(request);
    };
    uint64_t size = text.size();
    std::string size_text(reinterpret_cast<const char*>(&size), sizeof size);
    broadcast(size_text);
    std::memcpy(&size, size_text.data(), sizeof size);
    text.resize(size);
    if (size > 0) broadcast(text);
    return text;
}

std::optional<Error> Peers::exchange(const std::optional<Error>& mine) {
    const std::vector<std::string> texts = gather(mine ? encode(*mine) : "");
    for (size_t rank = 0; rank < texts.size(); ++rank) {
        if (texts[rank].empty()) continue;
        Error error = decode(texts[rank], name(static_cast<int>(rank)), name(this->rank()), world_size());
        if (comm_ && error.record()->launcher_rank < 0) {
            error = error.with_launcher_rank(comm_->launcher_rank(static_cast<int>(rank)));
        }
        // The rank itself keeps the causes, which do not travel.
        if (mine && static_cast<int>(rank) == this->rank() && mine->record()->cause != nullptr) {
            error = error.caused_by(Error(mine->record()->cause));
        }
        return error;
    }
    return Error(Code::internal, "a rank voted no without an error");
}

}  // namespace tsr

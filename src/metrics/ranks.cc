#include "metrics/ranks.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

namespace tsr::metrics {

namespace {

template <class T>
Tensor moved(std::span<const T> values) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    auto* data = const_cast<T*>(values.data());  // NOLINT: an input is not written
    return tensor_of(std::span(data, values.size()), sizeof(T) == 4 ? DType::i32 : DType::i64);
}

}  // namespace

void Ranks::agree(const std::optional<Error>& own, std::string_view text) {
    std::vector<uint64_t> hashes;
    if (const auto error = peers_.vote(own, uint64_t{std::hash<std::string_view>{}(text)}, hashes)) throw Error(*error);
    const auto other = std::ranges::find_if(hashes, [&](uint64_t hash) { return hash != hashes[0]; });
    if (other == hashes.end()) return;
    const std::vector<std::string> texts = peers_.gather(text);
    const auto which = static_cast<size_t>(other - hashes.begin());
    throw Error(
        Code::mismatch,
        fmt::format("rank {} has the metric {}, but rank 0 the metric {}; create the same metric on all ranks, and "
                    "compute several in the same order",
                    which, texts[which], texts[0]))
        .with_peer(static_cast<int>(which));
}

void Ranks::reduce(std::span<int64_t> values, ReduceOp op) {
    if (size() == 1 || values.empty()) return;
    const Tensor tensor = tensor_of(values, DType::i64);
    comm_->run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = op, .label = label_});
}

std::vector<int64_t> Ranks::gather(std::span<const int64_t> values) {
    if (size() == 1) return {values.begin(), values.end()};
    std::vector<int64_t> all(values.size() * static_cast<size_t>(size()));
    const Tensor input = moved(values);
    const Tensor output = tensor_of(std::span(all), DType::i64);
    comm_->run({.collective = Collective::all_gather, .inputs = {&input, 1}, .outputs = {&output, 1}, .label = label_});
    return all;
}

template <class T>
std::vector<T> Ranks::gather_all(std::span<const T> values) {
    if (size() == 1) return {values.begin(), values.end()};
    const auto own = static_cast<int64_t>(values.size());
    const std::vector<int64_t> counts = gather({&own, 1});
    std::vector<T> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
    if (all.empty()) return all;
    std::vector<Tensor> parts;
    size_t at = 0;
    for (const int64_t count : counts) {
        parts.push_back(moved(std::span<const T>(all).subspan(at, static_cast<size_t>(count))));
        at += static_cast<size_t>(count);
    }
    const Tensor input = moved(values);
    comm_->run({.collective = Collective::all_gather_v, .inputs = {&input, 1}, .outputs = parts, .label = label_});
    return all;
}

void Ranks::send(const Tensor& tensor, int peer) {
    if (tensor.numel() == 0) return;
    comm_->run({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = peer, .label = label_});
}

void Ranks::receive(const Tensor& tensor, int peer) {
    if (tensor.numel() == 0) return;
    comm_->run({.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = peer, .label = label_});
}

template <class T>
std::vector<T> Ranks::gather_to_first(std::span<const T> values) {
    std::vector<size_t> ends(static_cast<size_t>(size()), values.size());
    return exchange(values, ends).values;
}

// In round k, ranks whose sum is k modulo the world size meet: each has one partner, and the lower of the two sends first.
template <class T>
Ranks::Parts<T> Ranks::exchange(std::span<const T> values, std::span<const size_t> ends) {
    const int ranks = size();
    if (ranks == 1) return {{values.begin(), values.end()}, {values.size()}};
    const auto part = [&](int r) {
        const size_t begin = r == 0 ? 0 : ends[static_cast<size_t>(r) - 1];
        return values.subspan(begin, ends[static_cast<size_t>(r)] - begin);
    };
    std::vector<int64_t> sent;
    for (int r = 0; r < ranks; ++r) sent.push_back(static_cast<int64_t>(part(r).size()));
    std::vector<int64_t> counts(sent.size());
    const Tensor input = tensor_of(std::span(sent), DType::i64);
    const Tensor output = tensor_of(std::span(counts), DType::i64);
    comm_->run({.collective = Collective::all_to_all, .inputs = {&input, 1}, .outputs = {&output, 1}, .label = label_});

    std::vector<size_t> starts{0};
    for (const int64_t count : counts) starts.push_back(starts.back() + static_cast<size_t>(count));
    std::vector<T> received(starts.back());
    const auto place = [&](int r) {
        const auto at = static_cast<size_t>(r);
        return std::span(received).subspan(starts[at], starts[at + 1] - starts[at]);
    };
    for (int round = 0; round < ranks; ++round) {
        const int partner = (round - rank() + ranks) % ranks;
        if (partner == rank()) {
            std::ranges::copy(part(partner), place(partner).begin());
            continue;
        }
        const auto send_part = [&] { send(moved(part(partner)), partner); };
        if (rank() < partner) send_part();
        receive(moved(std::span<const T>(place(partner))), partner);
        if (rank() > partner) send_part();
    }
    starts.erase(starts.begin());
    return {std::move(received), std::move(starts)};
}

template std::vector<double> Ranks::gather_all(std::span<const double>);
template std::vector<uint32_t> Ranks::gather_all(std::span<const uint32_t>);
template std::vector<uint64_t> Ranks::gather_all(std::span<const uint64_t>);
template std::vector<int64_t> Ranks::gather_to_first(std::span<const int64_t>);
template std::vector<uint32_t> Ranks::gather_to_first(std::span<const uint32_t>);
template std::vector<uint64_t> Ranks::gather_to_first(std::span<const uint64_t>);
template std::vector<double> Ranks::gather_to_first(std::span<const double>);
template Ranks::Parts<double> Ranks::exchange(std::span<const double>, std::span<const size_t>);
template Ranks::Parts<uint32_t> Ranks::exchange(std::span<const uint32_t>, std::span<const size_t>);
template Ranks::Parts<uint64_t> Ranks::exchange(std::span<const uint64_t>, std::span<const size_t>);

}  // namespace tsr::metrics

#include "checkpoint/model/gathered_layout.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <climits>
#include <span>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "comm/peers.hpp"

namespace tsr {

namespace {

struct Head {
    int64_t ndim = 0;
    std::array<int64_t, max_ndim> shape{};
    int64_t boxes = 0;

    [[nodiscard]] Dims dims() const { return Dims(std::span(shape.data(), static_cast<size_t>(ndim))); }
};

Head head_of(const OwnBoxes& own) {
    Head head;
    head.ndim = own.shape.ndim();
    std::copy(own.shape.begin(), own.shape.end(), head.shape.begin());
    head.boxes = static_cast<int64_t>(own.boxes.size());
    return head;
}

// The ranks' tables of offsets and sizes, concatenated; their lengths follow from the heads.
std::vector<int64_t> gather_tables(Communicator& comm, std::vector<int64_t> own, std::span<const Head> heads) {
    int64_t total = 0;
    for (const Head& head : heads) total += head.boxes * 2 * head.ndim;
    if (heads.size() == 1 || total == 0) return own;
    std::vector<int64_t> all(static_cast<size_t>(total));
    std::vector<Tensor> parts;
    auto rest = std::span(all);
    for (const Head& head : heads) {
        const auto count = static_cast<size_t>(head.boxes * 2 * head.ndim);
        parts.push_back(tensor_of(rest.first(count), DType::i64));
        rest = rest.subspan(count);
    }
    const Tensor input = tensor_of(std::span(own), DType::i64);
    Request request;
    request.collective = Collective::all_gather_v;
    request.inputs = std::span(&input, 1);
    request.outputs = parts;
    request.label = "boxes of a layout";
    comm.run(request);
    return all;
}

}  // namespace

Layout gather_layout(const std::shared_ptr<Communicator>& comm, FunctionRef<OwnBoxes()> own) {
    OwnBoxes mine;
    const auto refused = attempt([&] {
        mine = own();
        for (const Box& box : mine.boxes) check_inside(box, mine.shape);
    });
    Peers peers(comm);
    std::vector<Head> heads;
    if (const auto agreed = peers.vote(refused, head_of(refused ? OwnBoxes() : mine), heads)) throw Error(*agreed);
    std::vector<int> counts;
    int64_t total = 0;
    for (size_t rank = 0; rank < heads.size(); ++rank) {
        if (heads[rank].dims() != heads[0].dims()) {
            throw Error(Code::mismatch,
                        fmt::format("rank {} passes boxes of a tensor of shape {}, but rank 0 of shape {}; "
                                    "pass the shape of the whole tensor on all ranks",
                                    rank, heads[rank].dims().str(), heads[0].dims().str()))
                .with_peer(static_cast<int>(rank));
        }
        total += heads[rank].boxes;
        if (total > INT_MAX) {
            throw Error(Code::invalid_argument, fmt::format("the ranks pass more than {} boxes of a tensor", INT_MAX));
        }
        counts.push_back(static_cast<int>(heads[rank].boxes));
    }
    std::vector<int64_t> table;
    for (const Box& box : mine.boxes) {
        table.insert(table.end(), box.offsets.begin(), box.offsets.end());
        table.insert(table.end(), box.sizes.begin(), box.sizes.end());
    }
    table = gather_tables(*comm, std::move(table), heads);
    const auto ndim = static_cast<size_t>(mine.shape.ndim());
    std::vector<Box> boxes;
    boxes.reserve(static_cast<size_t>(total));
    for (size_t at = 0; boxes.size() < static_cast<size_t>(total); at += 2 * ndim) {
        boxes.push_back({Dims(std::span(table).subspan(at, ndim)), Dims(std::span(table).subspan(at + ndim, ndim))});
    }
    return Layout::from_boxes(mine.shape, boxes, counts);
}

}  // namespace tsr

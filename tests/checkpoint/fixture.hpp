// What the checkpoint tests share: a directory that goes away, ranks as threads over a communicator of the test's own
// (votes need all-gather and broadcast alone), and states filled with the numbers of pattern.hpp.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "checkpoint/save/saver.hpp"
#include "comm/private_buffer.hpp"
#include "patience.hpp"
#include "pattern.hpp"
#include "ranks.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {

// Failures are provoked by the hundred here; their warnings would hide what matters.
inline const bool quiet = [] {
    log::set_level(log::Level::error);
    return true;
}();

class TempDir {
   public:
    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

   private:
    TemporaryDirectory directory_;
    std::string path_ = directory_.path().string();
};

inline std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline void spill(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// A communicator between threads of this process: all-gather and broadcast by a meeting under one mutex.
class Meeting {
   public:
    explicit Meeting(int world_size) : contributions_(static_cast<size_t>(world_size)) {}
    virtual ~Meeting() = default;
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;

    // Returns what every rank brought, when all have come; throws PEER_LOST once someone left.
    virtual std::vector<std::string> meet(int rank, std::string mine) {
        std::unique_lock lock(mutex_);
        const uint64_t turn = turn_;
        contributions_[static_cast<size_t>(rank)] = std::move(mine);
        if (++arrived_ == contributions_.size()) {
            result_ = contributions_;
            arrived_ = 0;
            ++turn_;
            changed_.notify_all();
            return result_;
        }
        const auto deadline = Clock::now() + patience(std::chrono::seconds(30));
        while (turn_ == turn) {
            if (lost_ >= 0) throw Error(Code::peer_lost, "rank " + std::to_string(lost_) + " is gone").with_peer(lost_);
            if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
                throw Error(Code::timeout, "a rank never came");
            }
        }
        return result_;
    }
    virtual void leave(int rank) {
        const std::lock_guard lock(mutex_);
        lost_ = rank;
        changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::string> contributions_;
    std::vector<std::string> result_;
    size_t arrived_ = 0;
    uint64_t turn_ = 0;
    int lost_ = -1;
};

class MeetingComm final : public Communicator {
   public:
    MeetingComm(std::shared_ptr<Meeting> meeting, int rank, int world_size)
        : meeting_(std::move(meeting)), rank_(rank), world_size_(world_size) {}
    int rank() const override { return rank_; }
    int world_size() const override { return world_size_; }
    const std::string& name() const override { return name_; }
    std::string_view transport() const override { return "meeting"; }
    CommOptions options() const override { return options_; }
    void set_timeout(milliseconds) override { throw Error(Code::unsupported, "set_timeout"); }
    void run(const Request& request) override {
        if (request.collective == Collective::all_gather) {
            const auto all = meeting_->meet(rank_, text(request.inputs[0]));
            std::byte* to = request.outputs[0].data;
            for (const std::string& one : all) {
                std::memcpy(to, one.data(), one.size());
                to += one.size();
            }
        } else if (request.collective == Collective::broadcast) {
            const auto all = meeting_->meet(rank_, text(request.outputs[0]));
            const std::string& root = all[static_cast<size_t>(request.peer)];
            std::memcpy(request.outputs[0].data, root.data(), root.size());
        } else {
            throw Error(Code::unsupported, "not in this test's communicator");
        }
    }
    WorkPtr submit(const Request&) override { throw Error(Code::unsupported, "submit"); }
    WorkPtr submit_job(std::function<void()>) override { throw Error(Code::unsupported, "submit"); }
    std::shared_ptr<Plan> prepare(const Request&) override { throw Error(Code::unsupported, "prepare"); }
    std::shared_ptr<Communicator> shrink(const CommOptions&) override { throw Error(Code::unsupported, "shrink"); }
    std::shared_ptr<Communicator> split(int, int, const CommOptions&) override {
        return std::make_shared<MeetingComm>(meeting_, rank_, world_size_);
    }
    std::shared_ptr<Buffer> allocate(size_t size) override { return std::make_shared<PrivateBuffer>(size); }
    void finalize() override {}
    void abort(const std::string&) override { meeting_->leave(rank_); }
    std::optional<Error> error() const override { return std::nullopt; }
    void write_trace(const std::string&) const override { throw Error(Code::unsupported, "write_trace"); }

   private:
    static std::string text(const Tensor& tensor) {
        return {reinterpret_cast<const char*>(tensor.data), tensor.size_bytes()};
    }
    std::shared_ptr<Meeting> meeting_;
    int rank_;
    int world_size_;
    std::string name_ = "meeting";
    CommOptions options_;
};

using RankBody = std::function<void(const std::shared_ptr<Communicator>& comm)>;

inline Outcomes run_meeting(int world_size, const RankBody& body) {
    auto meeting = std::make_shared<Meeting>(world_size);
    return run_threads(world_size, [&](int rank) {
        const auto comm = std::make_shared<MeetingComm>(meeting, rank, world_size);
        try {
            body(comm);
        } catch (...) {
            meeting->leave(rank);
            throw;
        }
    });
}

inline int64_t place_in(const Box& box, const Dims& shape, int64_t local) {
    int64_t place = 0;
    int64_t stride = 1;
    for (int d = shape.ndim() - 1; d >= 0; --d) {
        place += (box.offsets[d] + local % box.sizes[d]) * stride;
        local /= box.sizes[d];
        stride *= shape[d];
    }
    return place;
}

// A tensor's specification, the same for every world: how it is laid out over `world_size` ranks is drawn from `layout`.
struct Spec {
    std::string name;
    DType dtype;
    Dims shape;
};

// A state with memory of its own.
class OwnedState {
   public:
    State state;

    void add_whole(const Spec& spec) {
        memory_.push_back({spec, {Box::whole(spec.shape)}, {}});
        Entry& entry = memory_.back();
        state.add_tensor(spec.name, allocate(entry, 0));
    }
    void add_sharded(const Spec& spec, const Layout& layout, int rank) {
        memory_.push_back({spec, layout.boxes_of(rank), {}});
        Entry& entry = memory_.back();
        std::vector<Tensor> pieces;
        for (size_t i = 0; i < entry.boxes.size(); ++i) pieces.push_back(allocate(entry, i));
        state.add_sharded(spec.name, layout, spec.dtype, pieces, rank);
    }
    void fill(uint64_t salt = 0) {
        for_rows([&](const Spec& spec, std::byte* data, int64_t place, int64_t count) {
            Pattern(spec.name, salt).write(data, size_of(spec.dtype), place, count);
        });
    }
    void poison() {
        for (Entry& entry : memory_) {
            for (auto& piece : entry.pieces) std::fill(piece.begin(), piece.end(), std::byte{0xcd});
        }
    }
    // The number of elements that differ from what fill(salt) writes.
    int64_t differences(uint64_t salt = 0) {
        int64_t found = 0;
        for_rows([&](const Spec& spec, const std::byte* data, int64_t place, int64_t count) {
            found += Pattern(spec.name, salt).differences(data, size_of(spec.dtype), place, count);
        });
        return found;
    }

   private:
    struct Entry {
        Spec spec;
        std::vector<Box> boxes;
        std::vector<std::vector<std::byte>> pieces;
    };
    static Tensor allocate(Entry& entry, size_t index) {
        const Box& box = entry.boxes[index];
        entry.pieces.emplace_back(static_cast<size_t>(box.numel()) * size_of(entry.spec.dtype));
        return {entry.pieces.back().data(), box.sizes, entry.spec.dtype, {}};
    }
    // Elements that are neighbours in the whole tensor, too.
    template <class Visit>
    void for_rows(Visit visit) {
        for (Entry& entry : memory_) {
            const Spec& spec = entry.spec;
            for (size_t i = 0; i < entry.boxes.size(); ++i) {
                const Box& box = entry.boxes[i];
                const int64_t count = spec.shape.ndim() == 0 ? 1 : box.sizes[spec.shape.ndim() - 1];
                for (int64_t first = 0; first < box.numel(); first += count) {
                    visit(spec, entry.pieces[i].data() + static_cast<size_t>(first) * size_of(spec.dtype),
                          place_in(box, spec.shape, first), count);
                }
            }
        }
    }
    std::list<Entry> memory_;
};

inline SaverOptions saver_options() {
    SaverOptions options;
    options.timeout = patience(milliseconds{30000});
    options.writer = {"tessera test", "c++", "20"};
    return options;
}

// The one save directory in `root`.
inline std::string only_save(const std::string& root) {
    std::string found;
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
        if (entry.is_directory()) {
            EXPECT_TRUE(found.empty());
            found = entry.path().string();
        }
    }
    return found;
}

template <class Body>
Error error_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return Error(Code::ok, "");
}

}  // namespace tsr::testing

// NCCL as the transport of a communicator's CUDA tensors.

#include <fmt/core.h>

#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "comm/device_transport.hpp"
#include "comm/nccl/library.hpp"

namespace tsr {

namespace {

using nccl::Comm;
using nccl::Library;
using nccl::Result;

constexpr auto type_of_bytes = static_cast<int>(nccl::Type::u8);  // data that is only moved may be of any type
constexpr milliseconds flush_time{5000};

nccl::Config non_blocking() {
    nccl::Config config;
    config.blocking = 0;
    return config;
}

class NcclTransport final : public DeviceTransport {
   public:
    // Takes over a communicator whose ranks may not be connected yet: await() that.
    NcclTransport(Comm comm, int rank, int ranks, Device device)
        : nccl_(nccl::library()), api_(device_api(device)), device_(device), rank_(rank), ranks_(ranks), comm_(comm) {}

    // Returns once the ranks are connected, or fails for good.
    void await(Deadline deadline, const std::function<void()>& poll) {
        try {
            wait_until(
                [&] {
                    poll();
                    return is_settled("connecting the ranks");
                },
                deadline, "NCCL to connect the ranks");
        } catch (...) {
            NcclTransport::abort();
            throw;
        }
    }

    // Peers may still receive what this rank has sent, so this waits a moment for them.
    ~NcclTransport() override {
        if (comm_ == nullptr) return;
        try {
            throw_if_failed(nccl_.finalize(comm_), api_.name());
            wait_until([&] { return is_settled(api_.name()); }, Deadline::in(flush_time), "NCCL to send the rest");
            nccl_.destroy(std::exchange(comm_, nullptr));
        } catch (const Error&) {
            NcclTransport::abort();
        }
    }
    NcclTransport(const NcclTransport&) = delete;
    NcclTransport& operator=(const NcclTransport&) = delete;

    [[nodiscard]] std::string_view name() const override { return "nccl"; }
    [[nodiscard]] Device device() const override { return device_; }

    void require(const Request& request) const override {
        const Collective c = request.collective;
        if (c != Collective::all_reduce && c != Collective::reduce && c != Collective::reduce_scatter) return;
        for (const auto list : {request.inputs, request.outputs}) {
            for (const Tensor& tensor : list) static_cast<void>(nccl::number_of(tensor.dtype));
        }
    }

    void enqueue(const Request& request, StreamHandle stream) override {
        {
            const std::lock_guard lock(mutex_);
            throw_if_aborted();
            api_.in_use([&] {
                const Call call{*this, comm_, stream};
                if (is_one_call(request)) return call.issue(request);
                call.check(nccl_.group_start());
                try {
                    call.issue(request);
                } catch (...) {
                    nccl_.group_end();
                    throw;
                }
                call.check(nccl_.group_end());
            });
        }
        // A call may still be in progress when it returns, and the next one must not begin before it is done. That is quick
        // unless a peer is lost, which makes the communicator abort this.
        while (!is_settled(api_.name())) std::this_thread::yield();
    }

    // NCCL writes the new communicator in the background, until this one is settled or aborted.
    std::unique_ptr<DeviceTransport> split(const Part& part, Deadline deadline,
                                           const std::function<void()>& poll) override {
        static_assert(Part::no_color == nccl::no_color);
        Comm made = nullptr;
        try {
            {
                const std::lock_guard lock(mutex_);
                throw_if_aborted();
                nccl::Config config = non_blocking();
                api_.in_use([&] {
                    throw_if_failed(nccl_.split(comm_, part.color, part.rank, &made, &config), "splitting the ranks");
                });
            }
            await(deadline, poll);
        } catch (...) {
            NcclTransport::abort();
            if (made != nullptr) nccl_.abort(made);
            throw;
        }
        if (part.color == Part::no_color) return nullptr;
        auto transport = std::make_unique<NcclTransport>(made, part.rank, part.ranks, device_);
        transport->await(deadline, poll);
        return transport;
    }

    void check() override {
        const std::lock_guard lock(mutex_);
        if (comm_ == nullptr) return;
        Result result = nccl::success;
        nccl_.async_error(comm_, &result);
        throw_if_failed(result, api_.name());
    }

    void abort() override {
        const std::lock_guard lock(mutex_);
        if (comm_ != nullptr) nccl_.abort(std::exchange(comm_, nullptr));
    }

   private:
    // Of NCCL; the others are a group of calls.
    static bool is_one_call(const Request& request) {
        switch (request.collective) {
            case Collective::all_reduce:
            case Collective::reduce_scatter:
            case Collective::all_gather:
            case Collective::broadcast: return request.outputs.size() == 1;
            case Collective::reduce:
            case Collective::send:
            case Collective::recv: return true;
            default: return false;
        }
    }

    // One enqueue.
    struct Call {
        NcclTransport& transport;
        Comm comm;
        StreamHandle stream;

        void check(Result result) const { transport.throw_if_failed(result, transport.api_.name()); }

        void send(const std::byte* data, size_t size, int peer) const {
            if (size > 0) check(transport.nccl_.send(data, size, type_of_bytes, peer, comm, stream));
        }
        void receive(std::byte* data, size_t size, int peer) const {
            if (size > 0) check(transport.nccl_.recv(data, size, type_of_bytes, peer, comm, stream));
        }

        void issue(const Request& request) const {
            const Library& nccl = transport.nccl_;
            const auto ranks = static_cast<size_t>(transport.ranks_);
            const bool is_root = request.peer == transport.rank_;
            const std::span<const Tensor> in = request.inputs;
            const std::span<const Tensor> out = request.outputs;
            const auto count = [](const Tensor& tensor) { return static_cast<size_t>(tensor.numel()); };
            switch (request.collective) {
                case Collective::all_reduce:
                    for (const Tensor& tensor : out) {
                        check(nccl.all_reduce(tensor.data, tensor.data, count(tensor), nccl::number_of(tensor.dtype),
                                              nccl::number_of(request.op), comm, stream));
                    }
                    return;
                case Collective::reduce_scatter:
                    for (size_t i = 0; i < in.size(); ++i) {
                        check(nccl.reduce_scatter(in[i].data, out[i].data, count(out[i]), nccl::number_of(in[i].dtype),
                                                  nccl::number_of(request.op), comm, stream));
                    }
                    return;
                case Collective::reduce:
                    return check(nccl.reduce(in[0].data, is_root ? out[0].data : nullptr, count(in[0]),
                                             nccl::number_of(in[0].dtype), nccl::number_of(request.op), request.peer,
                                             comm, stream));
                case Collective::all_gather:
                    for (size_t i = 0; i < in.size(); ++i) {
                        check(
                            nccl.all_gather(in[i].data, out[i].data, in[i].size_bytes(), type_of_bytes, comm, stream));
                    }
                    return;
                case Collective::all_gather_v:
                    for (size_t r = 0; r < ranks; ++r) {
                        const bool own = static_cast<int>(r) == transport.rank_;
                        if (out[r].numel() == 0) continue;
                        check(nccl.broadcast(own ? in[0].data : out[r].data, out[r].data, out[r].size_bytes(),
                                             type_of_bytes, static_cast<int>(r), comm, stream));
                    }
                    return;
                case Collective::broadcast:
                    for (const Tensor& tensor : out) {
                        check(nccl.broadcast(tensor.data, tensor.data, tensor.size_bytes(), type_of_bytes, request.peer,
                                             comm, stream));
                    }
                    return;
                case Collective::gather:
                    send(in[0].data, in[0].size_bytes(), request.peer);
                    for (size_t r = 0; is_root && r < ranks; ++r) {
                        receive(out[0].data + r * in[0].size_bytes(), in[0].size_bytes(), static_cast<int>(r));
                    }
                    return;
                case Collective::scatter:
                    for (size_t r = 0; is_root && r < ranks; ++r) {
                        send(in[0].data + r * out[0].size_bytes(), out[0].size_bytes(), static_cast<int>(r));
                    }
                    return receive(out[0].data, out[0].size_bytes(), request.peer);
                case Collective::all_to_all: {
                    const size_t part = in[0].size_bytes() / ranks;
                    for (size_t r = 0; r < ranks; ++r) {
                        send(in[0].data + r * part, part, static_cast<int>(r));
                        receive(out[0].data + r * part, part, static_cast<int>(r));
                    }
                    return;
                }
                case Collective::send: return send(in[0].data, in[0].size_bytes(), request.peer);
                case Collective::recv: return receive(out[0].data, out[0].size_bytes(), request.peer);
                case Collective::barrier:
                case Collective::allocate:
                case Collective::finalize:
                case Collective::compute: break;
            }
            throw Error(Code::internal, fmt::format("{} has no tensors on a device", name_of(request.collective)));
        }
    };

    void throw_if_failed(Result result, std::string_view what) const {
        if (result == nccl::success || result == nccl::in_progress) return;
        throw nccl::error_of(result, comm_, std::string(what));
    }
    void throw_if_aborted() const {
        if (comm_ == nullptr) throw Error(Code::aborted, "the NCCL communicator was aborted");
    }
    // Whether the last call has ended.
    bool is_settled(std::string_view what) {
        const std::lock_guard lock(mutex_);
        throw_if_aborted();
        Result result = nccl::success;
        nccl_.async_error(comm_, &result);
        throw_if_failed(result, what);
        return result != nccl::in_progress;
    }

    const Library& nccl_;
    DeviceApi& api_;
    const Device device_;
    const int rank_;
    const int ranks_;
    std::mutex mutex_;     // guards what follows, and the calls on it
    Comm comm_ = nullptr;  // null once aborted
};

}  // namespace

NcclFacts nccl_facts() { return {nccl::version_text(nccl::library().version), nccl::library().path}; }

NcclId make_nccl_id() {
    nccl::UniqueId unique{};
    const Result result = nccl::library().get_unique_id(&unique);
    if (result != nccl::success) throw nccl::error_of(result, nullptr, "making an id for the ranks");
    NcclId id{};
    std::memcpy(id.data(), unique.bytes, sizeof unique);
    return id;
}

std::unique_ptr<DeviceTransport> make_nccl_transport(const NcclId& id, int rank, int ranks, Device device,
                                                     Deadline deadline, const std::function<void()>& poll) {
    nccl::UniqueId unique{};
    static_assert(sizeof unique == sizeof id);
    std::memcpy(unique.bytes, id.data(), sizeof unique);
    DeviceApi& api = device_api(device);
    nccl::Config config = non_blocking();
    Comm comm = nullptr;
    api.in_use([&] {
        const Result begun = nccl::library().init_rank(&comm, ranks, unique, rank, &config);
        if (begun != nccl::success && begun != nccl::in_progress) {
            throw nccl::error_of(begun, nullptr, fmt::format("{}: connecting {} ranks", api.name(), ranks));
        }
    });
    auto transport = std::make_unique<NcclTransport>(comm, rank, ranks, device);
    transport->await(deadline, poll);
    return transport;
}

}  // namespace tsr

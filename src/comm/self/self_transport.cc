// The transport of a communicator of one rank: outputs are the inputs.
#include <algorithm>

#include "comm/coalesce.hpp"
#include "comm/private_buffer.hpp"
#include "comm/transport.hpp"

namespace tsr {

namespace {

class SelfTransport final : public Transport {
   public:
    [[nodiscard]] std::string_view name() const override { return "self"; }

    void run(const Request& request, const Operation&, uint64_t, milliseconds) override {
        // Only these have an input apart from the output; a reduction over one rank is a copy.
        for (size_t i = 0; i < std::min(request.inputs.size(), request.outputs.size()); ++i) {
            copy_bytes(request.outputs[i].data, request.inputs[i].data, request.inputs[i].size_bytes());
        }
    }

    [[nodiscard]] std::unique_ptr<Transfer> start(const Request&, uint64_t, Deadline) override {
        throw Error(Code::invalid_argument, "a communicator with one rank has no peers");
    }
    void wait(std::span<Transfer* const>, const std::atomic<bool>&) override {}
    void wake() override {}

    [[nodiscard]] std::shared_ptr<Buffer> allocate(size_t size, uint64_t, milliseconds) override {
        return std::make_shared<PrivateBuffer>(size);
    }
    void abort(const Error&) override {}
    [[nodiscard]] std::optional<Error> peer_error() const override { return std::nullopt; }
    [[nodiscard]] std::vector<int> departed() const override { return {}; }
};

}  // namespace

std::unique_ptr<Transport> make_self_transport() { return std::make_unique<SelfTransport>(); }

}  // namespace tsr

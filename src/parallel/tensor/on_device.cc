#include "parallel/tensor/on_device.hpp"

#include <fmt/core.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "base/page_size.hpp"

namespace tsr {

struct HostFlags::Words {
    explicit Words(DeviceApi& device) : api(device) {}

    DeviceApi& api;
    std::mutex mutex;  // guards what follows
    std::vector<std::shared_ptr<std::byte>> pages;
    std::vector<unsigned*> free;
};

HostFlags::HostFlags(DeviceApi& api) : words_(std::make_shared<Words>(api)) {}

std::shared_ptr<unsigned> HostFlags::take() {
    const std::lock_guard lock(words_->mutex);
    if (words_->free.empty()) {
        words_->pages.push_back(words_->api.allocate_host(page_size));
        auto* const first = reinterpret_cast<unsigned*>(words_->pages.back().get());
        for (size_t i = 0; i < page_size / sizeof(unsigned); ++i) words_->free.push_back(first + i);
    }
    unsigned* const word = words_->free.back();
    words_->free.pop_back();
    *word = 0;
    return {word, [words = words_](unsigned* done) {
                const std::lock_guard freeing(words->mutex);
                words->free.push_back(done);
            }};
}

void check_rows(std::string_view what, size_t rows, size_t width) {
    constexpr size_t most = INT32_MAX;
    if (rows <= most && width <= most) return;
    throw Error(Code::unsupported,
                fmt::format("{} has {} rows of {} elements; on a CUDA device at most {} rows of as many are supported",
                            what, rows, width, most));
}

TpStreams::TpStreams(DeviceApi& api, milliseconds longest)
    : api_(api), longest_(longest), flags_(api), own_(api.new_stream()) {}

TpStreams::~TpStreams() {
    if (last_) (void)attempt([this] { last_->wait(Deadline::in(longest_)); });
}

void TpStreams::begin(StreamHandle stream) {
    if (last_ && !api_.is_captured(stream)) api_.wait(stream, *last_);
}

void TpStreams::end(StreamHandle stream) {
    if (api_.is_captured(stream)) return;
    if (last_) {
        api_.record_again(*last_, stream);
    } else {
        last_ = api_.record(stream);
    }
}

}  // namespace tsr

// What the operations of a tensor-parallel model need on a CUDA device: streams and memory. Used by the trainer's thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "base/clock.hpp"
#include "device/device.hpp"

namespace tsr {

// Words of the host that kernels set, so that nothing waits to learn of an error. Thread-safe.
class HostFlags {
   public:
    explicit HostFlags(DeviceApi& api);

    // A word that is 0 now; it goes back with its last reference, which is to be there until the kernels are done.
    [[nodiscard]] std::shared_ptr<unsigned> take();

   private:
    struct Words;
    const std::shared_ptr<Words> words_;
};

// Throws UNSUPPORTED, beginning with `what`, for more rows, or longer ones, than kernels with a block for each row take.
void check_rows(std::string_view what, size_t rows, size_t width);

// The program's streams, and one of the model's own for operations that return work. All that the model does on any of them
// is done one after the other, since it passes through the same memory:
//
//     program's    compute . . . . . . . . . . . . . order . compute . gather
//                      \ event                      / event            / event
//     own               gather . unpack . sum . . . . . . . . . . . . .
class TpStreams {
   public:
    // `longest`: how long operations may take; they then end by themselves.
    TpStreams(DeviceApi& api, milliseconds longest);
    ~TpStreams();  // returns when the device has done all of it
    TpStreams(const TpStreams&) = delete;
    TpStreams& operator=(const TpStreams&) = delete;

    [[nodiscard]] DeviceApi& api() const { return api_; }
    [[nodiscard]] StreamHandle own() const { return own_.get(); }
    [[nodiscard]] HostFlags& flags() { return flags_; }

    // Around what a stream gets of the model. A captured stream is left out: its operations run whenever the graph does.
    void begin(StreamHandle stream);
    void end(StreamHandle stream);
    // Lets `later` go on after all that `earlier` has now. Throws INVALID_STATE if that is captured.
    void order(StreamHandle later, StreamHandle earlier) { api_.wait(later, *api_.record(earlier)); }

   private:
    DeviceApi& api_;
    const milliseconds longest_;
    HostFlags flags_;
    const std::shared_ptr<void> own_;
    std::unique_ptr<DeviceEvent> last_;  // after the last operation; null: there was none
};

}  // namespace tsr

#include "checkpoint/formats/device_reads.hpp"

#include "base/attempt.hpp"
#include "base/log.hpp"
#include "checkpoint/io/cufile.hpp"

namespace tsr {

void DeviceReads::ask(CopyStream* on) {
    if (on == nullptr || devices_.contains(on)) return;
    bool& possible = devices_[on];
    possible = cufile::library_for(on->device()) != nullptr;
    if (!possible || verify_ == Verify::none) return;
    const auto lacking = attempt([&] { on->device().require_kernels(); });
    if (!lacking) return;
    possible = false;
    log::debug("{}: files are read through the host, to verify them: {}", on->device().name(), lacking->what());
}

bool read_to_device(File& file, int64_t offset, int64_t size, std::byte* to, CopyStream& on) {
    if (!file.is_direct()) return false;
    on.wait();
    return file.read_to_device(on.device(), to, size, offset) == size;
}

}  // namespace tsr

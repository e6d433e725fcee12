#include "device/cuda/range.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"

namespace tsr::cuda {

namespace {

PagesKind kind_on(Number device) {
    PagesKind kind;
    kind.location.device = device;
    return kind;
}

// In whole pages of the device, at least one.
size_t in_pages(const Driver& functions, Number device, size_t size, FunctionRef<std::string()> what) {
    const PagesKind kind = kind_on(device);
    size_t page = 0;
    check(functions.granularity(&page, &kind, smallest_granularity), what);
    return round_up(std::max(size, size_t{1}), page);
}

// Freed by the driver once nothing shows them either.
class Pages {
   public:
    Pages(const Driver& functions, Number device, size_t size, FunctionRef<std::string()> what)
        : functions_(functions), size_(in_pages(functions, device, size, what)) {
        const PagesKind kind = kind_on(device);
        check(functions_.pages_create(&handle_, size_, &kind, 0), what);
    }
    ~Pages() { functions_.pages_release(handle_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    [[nodiscard]] PagesHandle handle() const { return handle_; }
    [[nodiscard]] size_t size() const { return size_; }

   private:
    const Driver& functions_;
    const size_t size_;
    PagesHandle handle_ = 0;
};

class CudaRange final : public DeviceRange {
   public:
    CudaRange(const Driver& functions, Number device, std::string name, size_t size)
        : functions_(functions), device_(device), name_(std::move(name)) {
        const auto what = [&] { return fmt::format("{}: reserving {} bytes of addresses", name_, size); };
        size_ = in_pages(functions, device, size, what);
        check(functions_.addresses_reserve(&at_, size_, 0, 0, 0), what);
    }
    ~CudaRange() override {
        if (shown_) functions_.unmap(at_, shown_->size());
        functions_.addresses_free(at_, size_);
    }
    CudaRange(const CudaRange&) = delete;
    CudaRange& operator=(const CudaRange&) = delete;

    [[nodiscard]] std::byte* data() const override {
        return reinterpret_cast<std::byte*>(at_);  // NOLINT(performance-no-int-to-ptr)
    }

    void show(std::shared_ptr<void> pages) override {
        if (pages == shown_) return;
        const auto next = std::static_pointer_cast<const Pages>(std::move(pages));
        const size_t size = next->size();
        const auto what = [&] { return fmt::format("{}: mapping {} bytes", name_, size); };
        if (size > size_) throw Error(Code::internal, fmt::format("{} into a range of {}", what(), size_));
        if (shown_) check(functions_.unmap(at_, shown_->size()), what);
        shown_.reset();
        check(functions_.map(at_, size, 0, next->handle(), 0), what);
        shown_ = next;
        Access access;
        access.location.device = device_;
        check(functions_.set_access(at_, size, &access, 1), what);
    }

   private:
    const Driver& functions_;
    const Number device_;
    const std::string name_;
    size_t size_ = 0;
    Address at_ = 0;
    std::shared_ptr<const Pages> shown_;  // from the beginning of the range on; null: no memory is there
};

}  // namespace

std::shared_ptr<void> make_pages(const Driver& functions, Number device, size_t size, FunctionRef<std::string()> what) {
    return std::make_shared<Pages>(functions, device, size, what);
}

std::unique_ptr<DeviceRange> make_range(const Driver& functions, Number device, const std::string& name, size_t size) {
    return std::make_unique<CudaRange>(functions, device, name, size);
}

}  // namespace tsr::cuda

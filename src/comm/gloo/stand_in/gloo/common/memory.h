// Stands in for a header that Gloo's own include and that Debian's package of Gloo leaves out. The classes in which it is used
// hold one pointer by it, and what is done with that is done in Gloo's library.
#pragma once

#if __has_include_next(<gloo/common/memory.h>)
#include_next <gloo/common/memory.h>
#else

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr final {
    std::shared_ptr<T> ptr_;
};

template <typename T>
class WeakNonOwningPtr final {
    std::weak_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr final {
    std::shared_ptr<T> ptr_;
};

}  // namespace gloo

#endif

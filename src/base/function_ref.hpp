// A reference to a callable, valid for one call: like std::function, but never allocates.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace tsr {

template <class Signature>
class FunctionRef;

template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
   public:
    template <class Body>
        requires(!std::is_same_v<std::remove_cvref_t<Body>, FunctionRef>)
    FunctionRef(Body&& body)  // NOLINT(google-explicit-constructor): where a function is asked for, a lambda may stand
        : body_(const_cast<void*>(static_cast<const void*>(std::addressof(body)))),
          call_([](void* called, Args... args) -> Result {
              return (*static_cast<std::remove_reference_t<Body>*>(called))(std::forward<Args>(args)...);
          }) {}
    Result operator()(Args... args) const { return call_(body_, std::forward<Args>(args)...); }

   private:
    void* body_;
    Result (*call_)(void*, Args...);
};

}  // namespace tsr

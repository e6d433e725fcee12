// What every shim is made of, the generated ones (generated.cc) and those by hand. A shim runs its body in shim(): a tsr_status that is not TSR_OK becomes a Java exception
// in the same native frame, and no C++ exception leaves it. Handles cross as jlong, text as UTF-8 bytes, tensors as one
// long[] of descriptors; elements never cross. Nothing here holds a critical region.
#pragma once

#include <jni.h>
#include <tessera/tessera.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tsr::jni {

// Unwinds a shim while a Java exception is pending.
struct Pending {};

// The environment of the calling thread, which is attached as a daemon if it is a thread of the library; detached when
// the thread ends. NULL once the JVM is gone.
JNIEnv* attached_env() noexcept;

void throw_java(JNIEnv* env, const char* class_name, const char* message) noexcept;
// Throws the calling thread's last Tessera error as a dev.tessera.TesseraException.
void throw_last_error(JNIEnv* env, tsr_status status) noexcept;
// The Java object of an error with its causes; NULL with an exception pending if the JVM has no memory.
jobject exception_of(JNIEnv* env, const tsr_error* error);

inline void check_pending(JNIEnv* env) {
    if (env->ExceptionCheck()) throw Pending{};
}

inline void check(JNIEnv* env, tsr_status status) {
    if (status == TSR_OK) return;
    throw_last_error(env, status);
    throw Pending{};
}

// Runs a shim's body; on failure a Java exception is pending and the result is zero.
template <class Body>
auto shim(JNIEnv* env, Body&& body) noexcept -> std::invoke_result_t<Body> {
    using Result = std::invoke_result_t<Body>;
    try {
        return body();
    } catch (const Pending&) {
    } catch (const std::bad_alloc&) {
        throw_java(env, "java/lang/OutOfMemoryError", "native memory of a Tessera call");
    } catch (const std::exception& error) {
        throw_java(env, "java/lang/IllegalStateException", error.what());
    }
    if constexpr (!std::is_void_v<Result>) return Result{};
}

// While it lives, blocking calls of this thread end with INTERRUPTED once Thread.isInterrupted() is true.
class Interruptible {
   public:
    explicit Interruptible(JNIEnv* env);
    ~Interruptible();
    Interruptible(const Interruptible&) = delete;
    Interruptible& operator=(const Interruptible&) = delete;
};

// A call that may block: interruptible, and checked.
template <class Call>
void blocking(JNIEnv* env, Call&& call) {
    tsr_status status = TSR_OK;
    {
        const Interruptible scope(env);
        status = call();
    }
    check(env, status);
}

template <class Handle>
Handle* as(jlong handle) {
    return reinterpret_cast<Handle*>(static_cast<uintptr_t>(handle));
}

inline jlong as_long(const void* pointer) { return static_cast<jlong>(reinterpret_cast<uintptr_t>(pointer)); }

// A byte[] of UTF-8 (without a final 0) as a C string; c_str() is NULL if the array was null.
class Text {
   public:
    Text(JNIEnv* env, jbyteArray bytes);
    [[nodiscard]] const char* c_str() const { return null_ ? nullptr : value_.c_str(); }
    [[nodiscard]] const void* data() const { return null_ ? nullptr : value_.data(); }
    [[nodiscard]] size_t size() const { return value_.size(); }

   private:
    std::string value_;
    bool null_;
};

std::vector<Text> texts(JNIEnv* env, jobjectArray arrays);
std::vector<int64_t> longs(JNIEnv* env, jlongArray array);
std::vector<int32_t> ints(JNIEnv* env, jintArray array);
jbyteArray bytes_of(JNIEnv* env, const void* data, size_t size);
jbyteArray bytes_of(JNIEnv* env, const char* text);
jlongArray longs_of(JNIEnv* env, const int64_t* values, size_t count);

// Reads text that the library writes into a caller's buffer: get(buffer, capacity, &size).
template <class Get>
jbyteArray text_of(JNIEnv* env, Get&& get) {
    std::string buffer(1024, '\0');
    for (;;) {
        size_t size = 0;
        check(env, get(buffer.data(), buffer.size(), &size));
        if (size <= buffer.size()) return bytes_of(env, buffer.data(), size - 1);
        buffer.resize(size);
    }
}

inline constexpr size_t descriptor_words = 5;  // before the sizes

// Tensors out of descriptors laid end to end: address, dtype, device type, device index, ndim, then ndim sizes
// (dev.tessera.Tensor writes them). A null array is no tensors.
class Tensors {
   public:
    Tensors(JNIEnv* env, jlongArray descriptors);
    Tensors(const Tensors&) = delete;
    Tensors& operator=(const Tensors&) = delete;
    [[nodiscard]] const tsr_tensor* data() const { return data_; }
    [[nodiscard]] size_t size() const { return size_; }
    [[nodiscard]] const tsr_tensor& operator[](size_t i) const { return data_[i]; }

   private:
    // Of one tensor, as most calls have it: no allocation. Shapes point into the words.
    std::array<int64_t, descriptor_words + TSR_MAX_NDIM> one_words_;
    tsr_tensor one_{};
    std::vector<int64_t> words_;
    std::vector<tsr_tensor> tensors_;
    const tsr_tensor* data_ = nullptr;
    size_t size_ = 0;
};

// The descriptor of a tensor that the library hands out.
void describe(std::vector<int64_t>& words, const tsr_tensor& tensor);
jlongArray descriptor_of(JNIEnv* env, const tsr_tensor& tensor);

// Named tensors: the names and the descriptors have the same length.
class Params {
   public:
    Params(JNIEnv* env, jobjectArray names, jlongArray descriptors);
    [[nodiscard]] const tsr_param* data() const { return params_.data(); }
    [[nodiscard]] size_t size() const { return params_.size(); }

   private:
    std::vector<Text> names_;
    Tensors tensors_;
    std::vector<tsr_param> params_;
};

// The struct of C that a dev.tessera.OptionStruct keeps; NULL for null, which is all defaults.
void* struct_of(JNIEnv* env, jobject options, size_t size);
template <class Struct>
Struct* options_of(JNIEnv* env, jobject options) {
    return static_cast<Struct*>(struct_of(env, options, sizeof(Struct)));
}

// An error that the library hands out.
class DetachedError {
   public:
    DetachedError() = default;
    ~DetachedError() { tsr_error_destroy(error_); }
    DetachedError(const DetachedError&) = delete;
    DetachedError& operator=(const DetachedError&) = delete;
    tsr_error** operator&() { return &error_; }
    [[nodiscard]] const tsr_error* get() const { return error_; }

   private:
    tsr_error* error_ = nullptr;
};

// Lists that belong together element by element.
template <class First, class Second>
void same_size(const First& first, const Second& second) {
    if (first.size() != second.size()) throw std::logic_error("lists that belong together differ in length");
}

// Runs issue(work_out) now, or asynchronously if a work is wanted.
template <class Issue>
jlong run(JNIEnv* env, jboolean async, Issue&& issue) {
    tsr_work* work = nullptr;
    blocking(env, [&] { return issue(async ? &work : nullptr); });
    return as_long(work);
}

// The descriptor string of a C++ shim, so that a Java declaration that differs from it fails when the library loads.
template <class T>
constexpr const char* type_code() {
    if constexpr (std::is_same_v<T, void>)
        return "V";
    else if constexpr (std::is_same_v<T, jboolean>)
        return "Z";
    else if constexpr (std::is_same_v<T, jint>)
        return "I";
    else if constexpr (std::is_same_v<T, jlong>)
        return "J";
    else if constexpr (std::is_same_v<T, jdouble>)
        return "D";
    else if constexpr (std::is_same_v<T, jbyteArray>)
        return "[B";
    else if constexpr (std::is_same_v<T, jintArray>)
        return "[I";
    else if constexpr (std::is_same_v<T, jlongArray>)
        return "[J";
    else if constexpr (std::is_same_v<T, jdoubleArray>)
        return "[D";
    else if constexpr (std::is_same_v<T, jobjectArray>)
        return "[[B";
    else {
        static_assert(std::is_same_v<T, jobject>, "a type that no shim has used yet");
        return "Ljava/lang/Object;";
    }
}

template <class Result, class... Args>
std::string signature_of(Result (*)(JNIEnv*, jclass, Args...)) {
    std::string signature = "(";
    ((signature += type_code<Args>()), ...);
    return signature + ")" + type_code<Result>();
}

template <auto Function>
JNINativeMethod method(const char* name) {
    static std::string signature = signature_of(Function);
    return {const_cast<char*>(name), signature.data(), reinterpret_cast<void*>(Function)};
}

using Methods = std::vector<JNINativeMethod>;

// All natives of the class dev.tessera.PlainNatives.
Methods plain_methods();
// One list a concept, all natives of the class dev.tessera.Native.
Methods version_methods();
Methods log_methods();
Methods store_methods();
Methods work_methods();
Methods memory_methods();
Methods mesh_methods();
Methods layout_methods();
Methods ddp_methods();
Methods fsdp_methods();
Methods engine_methods();
Methods tp_methods();
Methods pipeline_methods();
Methods lr_schedule_methods();
Methods data_methods();
Methods state_methods();
Methods checkpoint_methods();
Methods storage_methods();

// Called by JNI_OnLoad: look up the classes that upcalls need.
void load_checkpoint_classes(JNIEnv* env);
void load_ddp_classes(JNIEnv* env);
void load_error_classes(JNIEnv* env);
void load_option_classes(JNIEnv* env);
void load_pipeline_classes(JNIEnv* env);
void load_tp_classes(JNIEnv* env);
void load_interrupt_classes(JNIEnv* env);
void load_log_classes(JNIEnv* env);
void load_work_classes(JNIEnv* env);
void load_storage_classes(JNIEnv* env);
void load_state_classes(JNIEnv* env);

// A class kept for the life of the library, and its methods; throw Pending if the Java side lacks them.
jclass global_class(JNIEnv* env, const char* name);
jmethodID static_method(JNIEnv* env, jclass type, const char* name, const char* signature);
jmethodID instance_method(JNIEnv* env, jclass type, const char* name, const char* signature);

}  // namespace tsr::jni

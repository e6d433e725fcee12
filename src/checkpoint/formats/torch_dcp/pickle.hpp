// Python's pickle as data. The machine reads protocols 2 to 5 into a tree of plain values and never imports, calls or
// builds anything: a global is two strings, and a call is a node with callee, arguments, state and items. The reader of
// a tree accepts the globals that it knows and refuses others. Memory is bounded by a small multiple of the input;
// nothing recurses, so depth costs no stack. Nodes may be shared and, through lists, dicts and calls, cyclic: readers
// must bound their depth and work.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tsr::pickle {

using Ref = uint32_t;
inline constexpr Ref no_ref = std::numeric_limits<Ref>::max();
inline constexpr int64_t max_bytes = int64_t{1} << 30;

enum class Kind : uint8_t {
    none,
    boolean,
    integer,
    big_integer,  // beyond 64 bits
    real,
    text,  // UTF-8 as in the input, including surrogates
    bytes,
    tuple,
    list,
    dict,  // also an OrderedDict or defaultdict
    set,
    global,
    call,        // REDUCE, NEWOBJ or NEWOBJ_EX, with the additions of BUILD, APPENDS and SETITEMS
    persistent,  // a persistent id
};

[[nodiscard]] std::string_view kind_name(Kind kind);

class Tree {
   public:
    // Throws CORRUPT "<what>: byte <n>, opcode <NAME>: <why>" on anything malformed, UNSUPPORTED on opcodes of
    // protocols 0 and 1, extensions and out-of-band buffers.
    [[nodiscard]] static Tree parse(std::string input, const std::string& what);

    [[nodiscard]] Ref root() const { return root_; }
    [[nodiscard]] const std::string& what() const { return what_; }
    [[nodiscard]] size_t size_bytes() const { return input_.size(); }
    [[nodiscard]] Kind kind(Ref node) const { return nodes_[node].kind; }
    [[nodiscard]] bool is(Ref node, Kind asked) const { return nodes_[node].kind == asked; }

    // Each throws CORRUPT if the kind differs.
    [[nodiscard]] bool as_bool(Ref node) const;
    [[nodiscard]] int64_t as_int(Ref node) const;
    [[nodiscard]] double as_real(Ref node) const;
    [[nodiscard]] std::string_view as_text(Ref node) const;
    [[nodiscard]] std::string_view as_bytes(Ref node) const;
    [[nodiscard]] std::string_view as_big_integer(Ref node) const;  // two's complement, little endian
    // The items of a tuple, list or set; for a dict, keys and values alternate.
    [[nodiscard]] std::span<const Ref> items(Ref node) const;
    [[nodiscard]] Ref persistent_id(Ref node) const;
    // The parts of a call. `state` is no_ref without BUILD; items are those of APPENDS or SETITEMS.
    [[nodiscard]] Ref callee(Ref node) const;
    [[nodiscard]] std::span<const Ref> arguments(Ref node) const;
    [[nodiscard]] Ref state(Ref node) const;

    [[nodiscard]] bool is_global(Ref node, std::string_view module, std::string_view name) const;
    [[nodiscard]] bool is_call_of(Ref node, std::string_view module, std::string_view name) const;
    // For messages: "module.name" of a global or of a call's callee; otherwise the kind.
    [[nodiscard]] std::string name(Ref node) const;
    [[nodiscard]] std::string_view module_of(Ref global) const;
    [[nodiscard]] std::string_view name_of(Ref global) const;
    // The value of a text key in a dict; no_ref if it is missing.
    [[nodiscard]] Ref find(Ref dict, std::string_view key) const;

    [[noreturn]] void refuse(Ref node, std::string_view expected) const;

   private:
    friend class Machine;
    struct Node {
        Kind kind = Kind::none;
        uint32_t a = 0;
        uint64_t b = 0;
    };
    struct Call {
        Ref callee = no_ref;
        Ref arguments = no_ref;
        Ref state = no_ref;
        uint32_t items = std::numeric_limits<uint32_t>::max();
    };
    [[nodiscard]] std::string_view slice(const Node& node) const {
        return std::string_view(input_).substr(node.b, node.a);
    }
    const Node& expect(Ref node, Kind kind) const;

    std::string what_;
    std::string input_;
    std::vector<Node> nodes_;
    std::vector<Ref> tuples_;              // items of all tuples
    std::vector<std::vector<Ref>> lists_;  // items of what can grow
    std::vector<Call> calls_;
    Ref root_ = no_ref;
};

}  // namespace tsr::pickle

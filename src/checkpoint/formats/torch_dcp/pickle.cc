#include "checkpoint/formats/torch_dcp/pickle.hpp"

#include <fmt/core.h>

#include <bit>
#include <unordered_map>

#include "base/error.hpp"

namespace tsr::pickle {

namespace {

enum class Op : uint8_t {
    mark = '(',
    stop = '.',
    pop = '0',
    pop_mark = '1',
    dup = '2',
    binint = 'J',
    binint1 = 'K',
    binint2 = 'M',
    none = 'N',
    binpersid = 'Q',
    reduce = 'R',
    binstring = 'T',
    short_binstring = 'U',
    binunicode = 'X',
    append = 'a',
    build = 'b',
    global = 'c',
    dict = 'd',
    empty_dict = '}',
    appends = 'e',
    binget = 'h',
    long_binget = 'j',
    list = 'l',
    empty_list = ']',
    binput = 'q',
    long_binput = 'r',
    setitem = 's',
    tuple = 't',
    empty_tuple = ')',
    setitems = 'u',
    binfloat = 'G',
    proto = 0x80,
    newobj = 0x81,
    tuple1 = 0x85,
    tuple2 = 0x86,
    tuple3 = 0x87,
    newtrue = 0x88,
    newfalse = 0x89,
    long1 = 0x8a,
    long4 = 0x8b,
    binbytes = 'B',
    short_binbytes = 'C',
    short_binunicode = 0x8c,
    binunicode8 = 0x8d,
    binbytes8 = 0x8e,
    empty_set = 0x8f,
    additems = 0x90,
    frozenset = 0x91,
    newobj_ex = 0x92,
    stack_global = 0x93,
    memoize = 0x94,
    frame = 0x95,
    bytearray8 = 0x96,
};

// Names for messages, of supported and of refused opcodes.
std::string op_name(uint8_t op) {
    struct Entry {
        uint8_t op;
        const char* name;
    };
    static constexpr Entry names[] = {
        {'(', "MARK"},
        {'.', "STOP"},
        {'0', "POP"},
        {'1', "POP_MARK"},
        {'2', "DUP"},
        {'F', "FLOAT"},
        {'I', "INT"},
        {'J', "BININT"},
        {'K', "BININT1"},
        {'L', "LONG"},
        {'M', "BININT2"},
        {'N', "NONE"},
        {'P', "PERSID"},
        {'Q', "BINPERSID"},
        {'R', "REDUCE"},
        {'S', "STRING"},
        {'T', "BINSTRING"},
        {'U', "SHORT_BINSTRING"},
        {'V', "UNICODE"},
        {'X', "BINUNICODE"},
        {'a', "APPEND"},
        {'b', "BUILD"},
        {'c', "GLOBAL"},
        {'d', "DICT"},
        {'}', "EMPTY_DICT"},
        {'e', "APPENDS"},
        {'g', "GET"},
        {'h', "BINGET"},
        {'i', "INST"},
        {'j', "LONG_BINGET"},
        {'l', "LIST"},
        {']', "EMPTY_LIST"},
        {'o', "OBJ"},
        {'p', "PUT"},
        {'q', "BINPUT"},
        {'r', "LONG_BINPUT"},
        {'s', "SETITEM"},
        {'t', "TUPLE"},
        {')', "EMPTY_TUPLE"},
        {'u', "SETITEMS"},
        {'G', "BINFLOAT"},
        {0x80, "PROTO"},
        {0x81, "NEWOBJ"},
        {0x82, "EXT1"},
        {0x83, "EXT2"},
        {0x84, "EXT4"},
        {0x85, "TUPLE1"},
        {0x86, "TUPLE2"},
        {0x87, "TUPLE3"},
        {0x88, "NEWTRUE"},
        {0x89, "NEWFALSE"},
        {0x8a, "LONG1"},
        {0x8b, "LONG4"},
        {'B', "BINBYTES"},
        {'C', "SHORT_BINBYTES"},
        {0x8c, "SHORT_BINUNICODE"},
        {0x8d, "BINUNICODE8"},
        {0x8e, "BINBYTES8"},
        {0x8f, "EMPTY_SET"},
        {0x90, "ADDITEMS"},
        {0x91, "FROZENSET"},
        {0x92, "NEWOBJ_EX"},
        {0x93, "STACK_GLOBAL"},
        {0x94, "MEMOIZE"},
        {0x95, "FRAME"},
        {0x96, "BYTEARRAY8"},
        {0x97, "NEXT_BUFFER"},
        {0x98, "READONLY_BUFFER"},
    };
    for (const Entry& entry : names) {
        if (entry.op == op) return entry.name;
    }
    return fmt::format("{:#04x}", op);
}

constexpr std::string_view refused_ops = "FILPSVgiop\x82\x83\x84\x97\x98";

}  // namespace

std::string_view kind_name(Kind kind) {
    constexpr std::string_view names[] = {"None",     "a bool",  "an integer", "a large integer", "a float",
                                          "a string", "bytes",   "a tuple",    "a list",          "a dict",
                                          "a set",    "a class", "an object",  "a persistent id"};
    return names[static_cast<size_t>(kind)];
}

class Machine {
   public:
    explicit Machine(Tree& tree) : tree_(tree), input_(tree.input_) {}

    void run() {
        while (true) {
            op_at_ = at_;
            op_ = byte();
            if (static_cast<Op>(op_) == Op::stop) break;
            step(static_cast<Op>(op_));
        }
        if (stack_.size() != 1 || !marks_.empty()) {
            refuse(fmt::format("the stack has {} values at the end, expected 1", stack_.size()));
        }
        if (at_ != input_.size()) refuse(fmt::format("{} bytes follow STOP", input_.size() - at_));
        tree_.root_ = stack_.back();
    }

   private:
    using Node = Tree::Node;

    [[noreturn]] void refuse(std::string_view why) const {
        throw Error(Code::corrupt, fmt::format("{}: byte {}, opcode {}: {}", tree_.what_, op_at_, op_name(op_), why));
    }

    // --- input ---

    std::string_view take(uint64_t count) {
        if (count > input_.size() - at_)
            refuse(fmt::format("it needs {} bytes, but {} are left", count, input_.size() - at_));
        const std::string_view bytes = input_.substr(at_, count);
        at_ += count;
        return bytes;
    }
    uint8_t byte() {
        if (at_ == input_.size()) refuse("the pickle ends before STOP: it was truncated");
        return static_cast<uint8_t>(input_[at_++]);
    }
    uint64_t number(size_t bytes) {
        const std::string_view text = take(bytes);
        uint64_t value = 0;
        for (size_t i = 0; i < bytes; ++i) value |= uint64_t{static_cast<uint8_t>(text[i])} << (8 * i);
        return value;
    }
    std::string_view line() {
        const size_t end = input_.find('\n', at_);
        if (end == std::string_view::npos) refuse("a name is not terminated");
        const std::string_view text = input_.substr(at_, end - at_);
        at_ = end + 1;
        return text;
    }

    // --- nodes ---

    Ref add(Kind kind, uint32_t a = 0, uint64_t b = 0) {
        tree_.nodes_.push_back({kind, a, b});
        return static_cast<Ref>(tree_.nodes_.size() - 1);
    }
    void push(Ref node) { stack_.push_back(node); }
    void push_slice(Kind kind, std::string_view bytes) {
        push(add(kind, static_cast<uint32_t>(bytes.size()), static_cast<uint64_t>(bytes.data() - input_.data())));
    }
    void push_integer(int64_t value) { push(add(Kind::integer, 0, static_cast<uint64_t>(value))); }
    void push_long(std::string_view bytes) {
        // Redundant sign bytes are cut, so that each number has a single form.
        const auto is_sign = [&](size_t i, uint8_t sign) {
            return static_cast<uint8_t>(bytes[i]) == sign && ((static_cast<uint8_t>(bytes[i - 1]) ^ sign) & 0x80) == 0;
        };
        while (bytes.size() > 1 && (is_sign(bytes.size() - 1, 0) || is_sign(bytes.size() - 1, 0xff)))
            bytes.remove_suffix(1);
        if (bytes.size() > 8) return push_slice(Kind::big_integer, bytes);
        uint64_t value = 0;
        for (size_t i = 0; i < bytes.size(); ++i) value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
        if (!bytes.empty() && bytes.size() < 8 && (static_cast<uint8_t>(bytes.back()) & 0x80) != 0) {
            value |= ~uint64_t{0} << (8 * bytes.size());
        }
        push_integer(static_cast<int64_t>(value));
    }
    Ref add_growing(Kind kind) {
        tree_.lists_.emplace_back();
        return add(kind, static_cast<uint32_t>(tree_.lists_.size() - 1));
    }
    void push_tuple(size_t count) {
        if (count > stack_size()) refuse("the stack has too few values");
        const Ref node = add(Kind::tuple, static_cast<uint32_t>(count), tree_.tuples_.size());
        tree_.tuples_.insert(tree_.tuples_.end(), stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
        stack_.resize(stack_.size() - count);
        push(node);
    }

    // --- stack: values below the last mark are out of reach ---

    size_t stack_size() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
    Ref pop() {
        if (stack_size() == 0) refuse("the stack is empty");
        const Ref node = stack_.back();
        stack_.pop_back();
        return node;
    }
    Ref top() const {
        if (stack_size() == 0) refuse("the stack is empty");
        return stack_.back();
    }
    std::vector<Ref> pop_to_mark() {
        if (marks_.empty()) refuse("the stack has no mark");
        std::vector<Ref> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
        stack_.resize(marks_.back());
        marks_.pop_back();
        return items;
    }

    // --- memo: Python writes dense indices; others cost a little more ---

    void put(uint64_t index) {
        const Ref node = top();
        if (index < memo_.size()) {
            memo_[index] = node;
        } else if (index == memo_.size()) {
            memo_.push_back(node);
            if (!sparse_memo_.empty()) sparse_memo_.erase(index);
        } else {
            sparse_memo_.insert_or_assign(index, node);
        }
    }
    void get(uint64_t index) {
        if (index < memo_.size()) return push(memo_[index]);
        const auto found = sparse_memo_.find(index);
        if (found == sparse_memo_.end()) refuse(fmt::format("the memo has no entry {}", index));
        push(found->second);
    }

    // --- objects ---

    void push_global(Ref module, Ref name) {
        for (const Ref part : {module, name}) {
            if (tree_.nodes_[part].kind != Kind::text) refuse("a class's name is not a string");
            if (tree_.nodes_[part].a == 0) refuse("a class's name is empty");
        }
        push(add(Kind::global, 0, uint64_t{module} << 32 | name));
    }
    void push_call(Ref callee, Ref arguments) {
        // A tensor that has attributes, as the partitions of DeepSpeed's stage 3. They say nothing of its data.
        if (tree_.is_global(callee, "torch._tensor", "_rebuild_from_type_v2")) {
            const std::span<const Ref> parts = tree_.items(arguments);
            if (parts.size() == 4 && tree_.is_global(parts[1], "torch", "Tensor") && tree_.is(parts[2], Kind::tuple)) {
                callee = parts[0];
                arguments = parts[2];
            }
        }
        // Subclasses of dict, which states are made of.
        if (tree_.is_global(callee, "collections", "OrderedDict") && tree_.items(arguments).empty()) {
            return push(add_growing(Kind::dict));
        }
        if (tree_.is_global(callee, "collections", "defaultdict")) return push(add_growing(Kind::dict));
        tree_.calls_.push_back({callee, arguments, no_ref});
        push(add(Kind::call, static_cast<uint32_t>(tree_.calls_.size() - 1)));
    }
    std::vector<Ref>& items_of(Ref node, Kind kind) {
        const Node& target = tree_.nodes_[node];
        if (target.kind == kind) return tree_.lists_[target.a];
        if (target.kind != Kind::call) refuse(fmt::format("cannot add items to {}", kind_name(target.kind)));
        Tree::Call& call = tree_.calls_[target.a];
        if (call.items == std::numeric_limits<uint32_t>::max()) {
            call.items = static_cast<uint32_t>(tree_.lists_.size());
            tree_.lists_.emplace_back();
        }
        return tree_.lists_[call.items];
    }
    void add_items(Ref target, Kind kind, std::span<const Ref> items) {
        if (kind == Kind::dict && items.size() % 2 != 0) refuse("a key has no value");
        std::vector<Ref>& list = items_of(target, kind);
        list.insert(list.end(), items.begin(), items.end());
    }
    void build() {
        const Ref state = pop();
        const Node& target = tree_.nodes_[top()];
        if (target.kind == Kind::dict) return;  // attributes of an OrderedDict
        if (target.kind != Kind::call) refuse(fmt::format("cannot set the state of {}", kind_name(target.kind)));
        tree_.calls_[target.a].state = state;
    }

    void step(Op op) {
        switch (op) {
            case Op::proto:
                if (const uint8_t version = byte(); version < 2 || version > 5) {
                    refuse(fmt::format("protocol {} is not supported; use 2 to 5", version));
                }
                return;
            case Op::frame: (void)number(8); return;  // a hint for readers of streams
            case Op::mark: marks_.push_back(stack_.size()); return;
            case Op::pop:
                if (stack_size() == 0 && !marks_.empty()) {
                    marks_.pop_back();
                } else {
                    (void)pop();
                }
                return;
            case Op::pop_mark: (void)pop_to_mark(); return;
            case Op::dup: push(top()); return;
            case Op::none: push(add(Kind::none)); return;
            case Op::newtrue: push(add(Kind::boolean, 1)); return;
            case Op::newfalse: push(add(Kind::boolean, 0)); return;
            case Op::binint: push_integer(static_cast<int32_t>(static_cast<uint32_t>(number(4)))); return;
            case Op::binint1: push_integer(byte()); return;
            case Op::binint2: push_integer(static_cast<int64_t>(number(2))); return;
            case Op::long1: push_long(take(byte())); return;
            case Op::long4: push_long(take(number(4))); return;
            case Op::binfloat: {
                const std::string_view bytes = take(8);  // the only big-endian number
                uint64_t bits = 0;
                for (const char c : bytes) bits = bits << 8 | static_cast<uint8_t>(c);
                push(add(Kind::real, 0, bits));
                return;
            }
            // Python 2's strings: torch reads them as text.
            case Op::short_binstring:
            case Op::short_binunicode: push_slice(Kind::text, take(byte())); return;
            case Op::binstring:
            case Op::binunicode: push_slice(Kind::text, take(number(4))); return;
            case Op::binunicode8: push_slice(Kind::text, take(number(8))); return;
            case Op::short_binbytes: push_slice(Kind::bytes, take(byte())); return;
            case Op::binbytes: push_slice(Kind::bytes, take(number(4))); return;
            case Op::binbytes8:
            case Op::bytearray8: push_slice(Kind::bytes, take(number(8))); return;
            case Op::empty_tuple: push_tuple(0); return;
            case Op::tuple1: push_tuple(1); return;
            case Op::tuple2: push_tuple(2); return;
            case Op::tuple3: push_tuple(3); return;
            case Op::tuple: {
                if (marks_.empty()) refuse("the stack has no mark");
                const size_t count = stack_.size() - marks_.back();
                marks_.pop_back();
                push_tuple(count);
                return;
            }
            case Op::empty_list: push(add_growing(Kind::list)); return;
            case Op::empty_dict: push(add_growing(Kind::dict)); return;
            case Op::empty_set: push(add_growing(Kind::set)); return;
            case Op::list: return push_made(Kind::list);
            case Op::dict: return push_made(Kind::dict);
            case Op::frozenset: return push_made(Kind::set);
            case Op::append: {
                const Ref item = pop();
                add_items(top(), Kind::list, std::span(&item, 1));
                return;
            }
            case Op::appends: return add_marked(Kind::list);
            case Op::setitem: {
                const Ref value = pop();
                const Ref key = pop();
                const Ref pair[] = {key, value};
                add_items(top(), Kind::dict, pair);
                return;
            }
            case Op::setitems: return add_marked(Kind::dict);
            case Op::additems: return add_marked(Kind::set);
            case Op::global: {
                push_slice(Kind::text, line());
                push_slice(Kind::text, line());
                const Ref name = pop();
                const Ref module = pop();
                push_global(module, name);
                return;
            }
            case Op::stack_global: {
                const Ref name = pop();
                const Ref module = pop();
                push_global(module, name);
                return;
            }
            case Op::reduce:
            case Op::newobj: {
                const Ref arguments = pop();
                const Ref callee = pop();
                if (tree_.nodes_[arguments].kind != Kind::tuple) refuse("the arguments of a call are not a tuple");
                push_call(callee, arguments);
                return;
            }
            case Op::newobj_ex: {
                const Ref named = pop();
                const Ref arguments = pop();
                const Ref callee = pop();
                if (tree_.nodes_[arguments].kind != Kind::tuple || tree_.nodes_[named].kind != Kind::dict) {
                    refuse("the arguments of a call are not a tuple and a dict");
                }
                push_call(callee, arguments);
                if (!tree_.items(named).empty() && tree_.nodes_[top()].kind == Kind::call) {
                    tree_.calls_[tree_.nodes_[top()].a].state = named;
                }
                return;
            }
            case Op::build: return build();
            case Op::binpersid: {
                const Ref id = pop();
                push(add(Kind::persistent, id));
                return;
            }
            case Op::binput: put(byte()); return;
            case Op::long_binput: put(number(4)); return;
            case Op::memoize: put(memo_.size() + sparse_memo_.size()); return;
            case Op::binget: get(byte()); return;
            case Op::long_binget: get(number(4)); return;
            case Op::stop: return;
        }
        if (refused_ops.find(static_cast<char>(op_)) != std::string_view::npos) {
            throw Error(
                Code::unsupported,
                fmt::format("{}: byte {}: the opcode {} is not supported; use protocols 2 to 5 without extensions "
                            "and out-of-band buffers",
                            tree_.what_, op_at_, op_name(op_)));
        }
        refuse("unknown opcode");
    }
    void push_made(Kind kind) {
        const std::vector<Ref> items = pop_to_mark();
        const Ref node = add_growing(kind);
        add_items(node, kind, items);
        push(node);
    }
    void add_marked(Kind kind) {
        const std::vector<Ref> items = pop_to_mark();
        add_items(top(), kind, items);
    }

    Tree& tree_;
    std::string_view input_;
    size_t at_ = 0;
    size_t op_at_ = 0;
    uint8_t op_ = 0;
    std::vector<Ref> stack_;
    std::vector<size_t> marks_;
    std::vector<Ref> memo_;
    std::unordered_map<uint64_t, Ref> sparse_memo_;
};

Tree Tree::parse(std::string input, const std::string& what) {
    if (input.size() > static_cast<size_t>(max_bytes)) {
        throw Error(Code::unsupported,
                    fmt::format("{} is a pickle of {} bytes; at most {} are supported", what, input.size(), max_bytes));
    }
    Tree tree;
    tree.what_ = what;
    tree.input_ = std::move(input);
    Machine(tree).run();
    return tree;
}

void Tree::refuse(Ref node, std::string_view expected) const {
    throw Error(Code::corrupt, fmt::format("{0}: expected {2}, got {1}", what_, name(node), expected));
}

const Tree::Node& Tree::expect(Ref node, Kind kind) const {
    if (nodes_[node].kind != kind) refuse(node, kind_name(kind));
    return nodes_[node];
}

bool Tree::as_bool(Ref node) const { return expect(node, Kind::boolean).a != 0; }
int64_t Tree::as_int(Ref node) const { return static_cast<int64_t>(expect(node, Kind::integer).b); }
double Tree::as_real(Ref node) const { return std::bit_cast<double>(expect(node, Kind::real).b); }
std::string_view Tree::as_text(Ref node) const { return slice(expect(node, Kind::text)); }
std::string_view Tree::as_bytes(Ref node) const { return slice(expect(node, Kind::bytes)); }
std::string_view Tree::as_big_integer(Ref node) const { return slice(expect(node, Kind::big_integer)); }

std::span<const Ref> Tree::items(Ref node) const {
    const Node& found = nodes_[node];
    if (found.kind == Kind::tuple) return std::span(tuples_).subspan(found.b, found.a);
    if (found.kind == Kind::list || found.kind == Kind::dict || found.kind == Kind::set) return lists_[found.a];
    refuse(node, "a collection");
}

Ref Tree::persistent_id(Ref node) const { return expect(node, Kind::persistent).a; }
Ref Tree::callee(Ref node) const { return calls_[expect(node, Kind::call).a].callee; }
std::span<const Ref> Tree::arguments(Ref node) const { return items(calls_[expect(node, Kind::call).a].arguments); }
Ref Tree::state(Ref node) const { return calls_[expect(node, Kind::call).a].state; }

std::string_view Tree::module_of(Ref global) const {
    return as_text(static_cast<Ref>(expect(global, Kind::global).b >> 32));
}
std::string_view Tree::name_of(Ref global) const {
    return as_text(static_cast<Ref>(expect(global, Kind::global).b & 0xffffffff));
}

bool Tree::is_global(Ref node, std::string_view module, std::string_view name) const {
    return is(node, Kind::global) && name_of(node) == name && module_of(node) == module;
}

bool Tree::is_call_of(Ref node, std::string_view module, std::string_view name) const {
    return is(node, Kind::call) && is_global(callee(node), module, name);
}

std::string Tree::name(Ref node) const {
    if (is(node, Kind::call) && is(callee(node), Kind::global)) node = callee(node);
    if (!is(node, Kind::global)) return std::string(kind_name(kind(node)));
    // The name is untrusted: shortened, and without characters that would garble a terminal.
    std::string text = fmt::format("{}.{}", module_of(node).substr(0, 100), name_of(node).substr(0, 100));
    for (char& c : text) {
        if (c < 0x20 || c > 0x7e) c = '?';
    }
    return text;
}

Ref Tree::find(Ref dict, std::string_view key) const {
    const std::vector<Ref>& all = lists_[expect(dict, Kind::dict).a];
    Ref found = no_ref;
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
        if (is(all[i], Kind::text) && as_text(all[i]) == key) found = all[i + 1];
    }
    return found;
}

}  // namespace tsr::pickle

// Which names of hosts are accepted: those that mean the same to ssh, to a scheduler and to this launcher's own grammars.
// A name can become an argument of ssh, so it never begins with '-' and has no character that a shell interprets.
#pragma once

#include <string>
#include <string_view>

namespace tsr {

// Why `name` is refused, to follow "host 'NAME' "; empty: it is accepted. Accepted are letters, digits, '.', '_' and
// '-', up to 253 of them, beginning with a letter, a digit or '_'.
[[nodiscard]] std::string why_no_host_name(std::string_view name);

}  // namespace tsr

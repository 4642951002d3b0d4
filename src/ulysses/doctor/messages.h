#pragma once

#include <string>

#include "ulysses/doctor/case.h"

namespace ulysses::doctor {

// Whether an exception's text tells its reader what was asked for and not possible: it is ours, or names the option or
// feature, or speaks of heads, tokens, shards or ranks and gives one of the numbers of the case. A bare tensor shape
// ("shape '[2, 32, 2, 4]' is invalid for input of size 8192") does not.
bool is_clear_message(const Case& c, const std::string& message);

}  // namespace ulysses::doctor

/* What the theme lacks: tables that scroll can be reached with the keyboard, and examples can be copied as commands. */
(() => {
  "use strict"

  /* The commands of an example: lines behind `$ `, with their continuations, and without what they print. */
  const commandsOf = text => {
    const commands = []
    let goesOn = false
    for (const line of text.trimEnd().split("\n")) {
      if (line.startsWith("$ ")) commands.push(line.slice(2))
      else if (commands.length && line.startsWith("> ")) commands.push(line.slice(2))
      else if (goesOn) commands.push(line)
      else continue
      goesOn = line.endsWith("\\")
    }
    return commands.length ? commands.join("\n") : text
  }

  const addCopy = block => {
    const button = document.createElement("button")
    button.type = "button"
    button.className = "ck-copy"
    button.textContent = "Copy"
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(commandsOf(block.querySelector("code").textContent))
      button.textContent = "Copied"
      setTimeout(() => { button.textContent = "Copy" }, 2000)
    })
    block.prepend(button)
  }

  const reach = () => {
    for (const [at, box] of document.querySelectorAll(".md-typeset__scrollwrap").entries()) {
      if (box.scrollWidth <= box.clientWidth) continue
      box.tabIndex = 0
      box.setAttribute("role", "region")
      box.setAttribute("aria-label", `Table ${at + 1}`)
    }
  }

  if (navigator.clipboard) document.querySelectorAll("div.highlight").forEach(addCopy)
  window.addEventListener("load", reach)
  window.addEventListener("resize", reach)
})()
